"""Reads rows of a sparse matrix that is larger than the memory for it.

    python sparse.py [--rows 200000] [--batches 50]

A matrix in compressed rows (CSR), such as that of an `.h5ad` file of cells and genes, is three
arrays: the values and the columns of all elements, row by row, and where each row starts. Rows have
different lengths, so an index does not say them; `gather` reads those of a batch in one call for
each array.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

import bifolio

COLUMNS = 20_000
BATCH = 256


def write_matrix(directory: str, rows: int) -> NDArray[np.int64]:
    """Writes a matrix whose row `i` has ones in some columns. Returns where each row starts."""
    random = np.random.default_rng(1)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(random.integers(0, 1000, rows), out=starts[1:])
    with (
        open(os.path.join(directory, "columns"), "wb") as columns,
        open(os.path.join(directory, "values"), "wb") as values,
    ):
        for first in range(0, rows, 10_000):
            count = int(starts[min(first + 10_000, rows)] - starts[first])
            columns.write(random.integers(0, COLUMNS, count).astype("<i4").tobytes())
            values.write(np.ones(count, "<f4").tobytes())
    return starts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        starts = write_matrix(directory, options.rows)
        # Of the file, an eighth.
        cache = bifolio.Cache(max(int(starts[-1]), 1 << 20))
        columns = cache.memmap(os.path.join(directory, "columns"), "<i4", "r")
        values = cache.memmap(os.path.join(directory, "values"), "<f4", "r")
        random = np.random.default_rng(2)
        total = np.zeros(COLUMNS)
        begun = time.perf_counter()
        for _ in range(options.batches):
            rows = random.integers(0, options.rows, BATCH)
            lengths = starts[rows + 1] - starts[rows]
            found, offsets = values.gather(starts[rows], lengths)
            places, _ = columns.gather(starts[rows], lengths)
            np.add.at(total, places, found)
            assert len(found) == offsets[-1] == lengths.sum()
        each = (time.perf_counter() - begun) / options.batches
        print(f"{each * 1e3:.1f} ms a batch of {BATCH} rows; the bound is an eighth of the matrix")
        print(f"{total.sum():.0f} elements read\n{cache.stats()}")
        cache.close()


if __name__ == "__main__":
    main()
