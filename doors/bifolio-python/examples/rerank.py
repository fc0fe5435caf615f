"""Finds the nearest of many vectors, with the vectors on a file that is larger than the memory.

    python rerank.py [--vectors 200000] [--queries 256]

A search over embeddings has two steps. The first one ranks all vectors by short codes that fit the
memory: here one bit for each dimension. The second one ranks the best few hundred again, by the
vectors themselves, which are rows at random of a file. All candidates of a batch of queries are one
call of `take`, into memory that is used again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

import bifolio

DIMENSIONS = 256
CANDIDATES = 200
FOUND = 10
BATCH = 16


def normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the vectors with the length 1."""
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


def codes_of(vectors: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Returns a bit for each dimension: its sign."""
    return np.packbits(vectors > 0, axis=1).view(np.uint64)


def write_vectors(vectors: bifolio.Array, count: int) -> NDArray[np.uint64]:
    """Appends vectors around some centers. Returns their codes."""
    random = np.random.default_rng(1)
    centers = random.normal(size=(max(count // 100, 1), DIMENSIONS)).astype(np.float32)
    codes: list[NDArray[np.uint64]] = []
    for start in range(0, count, 10_000):
        length = min(10_000, count - start)
        part = centers[random.integers(0, len(centers), length)]
        part = normalized(part + random.normal(size=part.shape).astype(np.float32))
        vectors.append(part)
        codes.append(codes_of(part))
    vectors.flush()
    return np.concatenate(codes)


def candidates_of(
    codes: NDArray[np.uint64], queries: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Returns the vectors whose codes differ least from that of each query."""
    found = np.empty((len(queries), min(CANDIDATES, len(codes))), np.int64)
    for number, code in enumerate(codes_of(queries)):
        bits = np.unpackbits((codes ^ code).view(np.uint8), axis=1)
        distances = bits.sum(axis=1, dtype=np.int64)
        found[number] = np.argpartition(distances, found.shape[1] - 1)[: found.shape[1]]
    return found


def rerank(
    vectors: bifolio.Array,
    queries: NDArray[np.float32],
    candidates: NDArray[np.int64],
    room: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Returns the best candidates of each query, the best first."""
    rows = room[: len(queries)]
    vectors.take(candidates, out=rows)
    scores = np.matmul(rows, queries[:, :, np.newaxis])[..., 0]
    best = np.argsort(-scores, axis=1)[:, :FOUND]
    return np.take_along_axis(candidates, best, axis=1)


def exact(vectors: bifolio.Array, queries: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns the nearest vector of each query, by a look at all: a chunk at a time."""
    best = np.full(len(queries), -np.inf, np.float32)
    where = np.zeros(len(queries), np.int64)
    start = 0
    for chunk in vectors.chunks():
        scores = queries @ chunk.T
        winners = scores.argmax(axis=1)
        score = scores[np.arange(len(queries)), winners]
        where = np.where(score > best, winners + start, where)
        best = np.maximum(best, score)
        start += len(chunk)
    return where


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        # Of the file, an eighth.
        cache = bifolio.Cache(max(options.vectors * DIMENSIONS * 4 // 8, 1 << 20))
        path = os.path.join(directory, "vectors.npy")
        vectors = cache.open_array(path, "w+", dtype="<f4", shape=(0, DIMENSIONS))
        codes = write_vectors(vectors, options.vectors)
        random = np.random.default_rng(2)
        count: int = options.queries
        near = vectors.take(random.integers(0, len(vectors), count))
        noise = random.normal(size=(count, DIMENSIONS)).astype(np.float32)
        queries = normalized(near + 0.02 * noise)
        room = np.empty((BATCH, min(CANDIDATES, len(vectors)), DIMENSIONS), np.float32)
        found = np.empty((count, min(FOUND, len(vectors))), np.int64)
        seconds = 0.0
        for start in range(0, count, BATCH):
            batch = queries[start : start + BATCH]
            candidates = candidates_of(codes, batch)
            begun = time.perf_counter()
            found[start : start + BATCH] = rerank(vectors, batch, candidates, room)
            seconds += time.perf_counter() - begun
        right = (found[:, 0] == exact(vectors, queries)).mean()
        print(f"{seconds / count * 1e3:.2f} ms a query for the second step")
        print(f"the nearest of all is the first found for {right:.0%}; the file is 8 x the bound")
        print(cache.stats())
        cache.close()


if __name__ == "__main__":
    main()
