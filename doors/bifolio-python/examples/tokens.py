"""Trains a tiny language model on a token file eight times as large as the memory for it.

    python tokens.py [--megabytes 256] [--steps 200]

As nanoGPT does it, each step takes a batch of sequences from random places of a file of 16-bit
tokens. nanoGPT creates its `numpy.memmap` anew for each batch, because the memory of the process
would grow otherwise. Here one array stays open, within a bound, and a batch is one call. The model
predicts a token from the one before it (a bigram table with a softmax), in numpy only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

import bifolio

VOCABULARY = 64
SEQUENCE = 256
BATCH = 64


def write_tokens(path: str, count: int) -> None:
    """Writes a text in which a token is mostly followed by the same other one."""
    random = np.random.default_rng(1)
    follower = random.permutation(VOCABULARY)
    with open(path, "wb") as file:
        while count > 0:
            length = min(count, 1 << 22)
            # Each follows from the one before, but for one in eight: runs of that chain.
            starts = random.integers(0, VOCABULARY, (length + 7) // 8)
            chain = [starts]
            for _ in range(7):
                chain.append(follower[chain[-1]])
            file.write(np.stack(chain, 1).reshape(-1)[:length].astype("<u2").tobytes())
            count -= length


def get_batch(
    tokens: bifolio.Array, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns sequences, and the token that follows each of theirs: nanoGPT's, in one call."""
    starts = random.integers(0, len(tokens) - SEQUENCE, BATCH)
    windows = tokens.gather(starts, SEQUENCE + 1).astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def step(
    table: NDArray[np.float64], x: NDArray[np.int64], y: NDArray[np.int64], rate: float
) -> float:
    """Improves the table by one batch. Returns the loss before, in nats per token."""
    before, after = x.reshape(-1), y.reshape(-1)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (before, after), 1)
    scores = np.exp(table - table.max(axis=1, keepdims=True))
    chances = scores / scores.sum(axis=1, keepdims=True)
    loss = -(counts * np.log(chances)).sum() / len(before)
    seen = counts.sum(axis=1, keepdims=True)
    table += rate * (counts - seen * chances) / np.maximum(seen, 1)
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256, help="length of the token file")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        path = os.path.join(directory, "tokens.bin")
        write_tokens(path, options.megabytes << 19)
        cache = bifolio.Cache(max(options.megabytes << 17, 1 << 20))
        tokens = cache.memmap(path, "<u2", "r")
        print(tokens)
        table = np.zeros((VOCABULARY, VOCABULARY))
        random = np.random.default_rng(2)
        begun = time.perf_counter()
        for number in range(options.steps):
            x, y = get_batch(tokens, random)
            loss = step(table, x, y, 2.0)
            if number % 50 == 0 or number == options.steps - 1:
                print(f"step {number}: loss {loss:.3f}")
        each = (time.perf_counter() - begun) / options.steps
        print(f"{each * 1e3:.1f} ms a step; the file is 8 x the bound\n{cache.stats()}")
        cache.close()


if __name__ == "__main__":
    main()
