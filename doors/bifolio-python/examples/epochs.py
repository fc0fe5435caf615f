"""Trains in shuffled epochs on rows of two files that are larger than the memory for them.

    python epochs.py [--rows 100000] [--epochs 3] [--workers N]

Each epoch reads every row once, in a new order. A batch is one call for the features and one for the
labels, by the same indices, and `prefetch` reads the next batch while the model learns from this
one: no worker processes, whose caches would hold the same pages n times. With `--workers`, torch's
`DataLoader` makes the batches, in that many processes; it asks the data set for a batch at a time,
by `__getitems__`. The model is a logistic regression, in numpy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bifolio

COLUMNS = 512
BATCH = 256

Batch = tuple[NDArray[np.float32], NDArray[np.uint8]]


class Pairs:
    """Features and labels of the same rows: a data set for torch's `DataLoader`, too."""

    def __init__(self, features: bifolio.Array, labels: bifolio.Array) -> None:
        self.features = features
        self.labels = labels

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Batch:
        return self.features[index], self.labels[index]

    def __getitems__(self, indices: list[int] | NDArray[np.int64]) -> Batch:
        """Returns the rows of a batch, in one call for each array."""
        return self.features.take(indices), self.labels.take(indices)

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        """Starts to read the rows of a batch."""
        self.features.prefetch(indices)
        self.labels.prefetch(indices)


def shuffled(pairs: Pairs, random: np.random.Generator) -> Iterator[Batch]:
    """Returns the batches of an epoch, each row once."""
    order = random.permutation(len(pairs))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    pairs.prefetch(batches[0])
    for number, batch in enumerate(batches):
        rows = pairs.__getitems__(batch)
        if number + 1 < len(batches):
            pairs.prefetch(batches[number + 1])
        yield rows


def loaded(pairs: Pairs, workers: int) -> Iterable[Batch]:
    """Returns the batches of any number of epochs, made by the workers of torch."""

    def whole(batch: Batch) -> Batch:
        # Nothing is left to collate.
        return batch

    data: Any = importlib.import_module("torch.utils.data")
    batches: Iterable[Batch] = data.DataLoader(
        pairs,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=whole,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    return batches


def write_rows(features: bifolio.Array, labels: bifolio.Array, count: int) -> None:
    """Appends rows whose label is the side of a plane on which they are."""
    random = np.random.default_rng(1)
    plane = random.normal(size=COLUMNS).astype(np.float32)
    for start in range(0, count, 10_000):
        rows = random.normal(size=(min(10_000, count - start), COLUMNS)).astype(np.float32)
        features.append(rows)
        labels.append((rows @ plane > 0).astype(np.uint8))
    features.flush()
    labels.flush()


def step(
    weights: NDArray[np.float32], rows: NDArray[np.float32], labels: NDArray[np.uint8]
) -> float:
    """Improves the weights by one batch. Returns the share of labels that were right before."""
    scores = rows @ weights
    chances = 1 / (1 + np.exp(-scores))
    weights += 0.5 * ((labels - chances) @ rows) / len(rows)
    return float(((scores > 0) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0, help="processes of torch's DataLoader")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        # Of the file of features, an eighth, in all processes together.
        bound = max(options.rows * COLUMNS * 4 // 8, 2 << 20)
        memory, each = bifolio.divide(bound, workers=options.workers)
        cache = bifolio.Cache(memory, worker_memory=each)
        features = cache.open_array(
            os.path.join(directory, "features.npy"), "w+", dtype="<f4", shape=(0, COLUMNS)
        )
        labels = cache.open_array(os.path.join(directory, "labels.npy"), "w+", dtype="u1", shape=(0,))
        write_rows(features, labels, options.rows)
        pairs = Pairs(features, labels)
        random = np.random.default_rng(2)
        batches = loaded(pairs, options.workers) if options.workers else None
        weights = np.zeros(COLUMNS, np.float32)
        for epoch in range(options.epochs):
            begun = time.perf_counter()
            right: list[float] = []
            seen = 0
            for rows, wanted in shuffled(pairs, random) if batches is None else batches:
                right.append(step(weights, rows, wanted))
                seen += len(rows)
            assert seen == options.rows
            seconds = time.perf_counter() - begun
            rate = seen / seconds
            print(f"epoch {epoch}: {np.mean(right):.1%} right, {rate:,.0f} rows a second")
        print(f"the file is 8 x the bound\n{cache.stats()}")
        cache.close()


if __name__ == "__main__":
    main()
