"""Reads rows of a sparse matrix that is larger than the memory for it.

    python sparse.py [--rows 200000] [--batches 50] [--h5ad FILE]

A matrix in compressed rows (CSR), such as that of an `.h5ad` file of cells and genes, is three
arrays: the values and the columns of all elements, row by row, and where each row starts. Rows have
different lengths, so an index does not say them; `gather` reads those of a batch in one call for
each array.

In an `.h5ad` file values and columns are in chunks of HDF5, which are read whole and often
compressed. `--h5ad` copies them once to files of their own, a part at a time, in the order of the
file; random rows are read there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bifolio

COLUMNS = 20_000
BATCH = 256
#: Elements that are copied at a time.
PART = 1 << 20


def write_matrix(directory: str, rows: int) -> NDArray[np.int64]:
    """Writes a matrix whose rows have ones in some columns. Returns where each row starts."""
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


def copy_matrix(directory: str, h5ad: str) -> tuple[NDArray[np.int64], int]:
    """Copies the matrix `X` of an `.h5ad` file. Returns where each row starts, and its columns."""
    h5py: Any = importlib.import_module("h5py")
    with bifolio.Cache("64 MiB") as cache, h5py.File(cache.open(h5ad), "r") as file:
        matrix: Any = file["X"]
        assert matrix.attrs["encoding-type"] == "csr_matrix", "X has its rows together"
        for name, source, kind in (("columns", "indices", "<i4"), ("values", "data", "<f4")):
            count = len(matrix[source])
            with open(os.path.join(directory, name), "wb") as target:
                for first in range(0, count, PART):
                    target.write(matrix[source][first : first + PART].astype(kind).tobytes())
        return matrix["indptr"][:].astype(np.int64), int(matrix.attrs["shape"][1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--h5ad", help="a file of anndata, whose matrix is read; needs h5py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        if options.h5ad:
            starts, width = copy_matrix(directory, options.h5ad)
        else:
            starts, width = write_matrix(directory, options.rows), COLUMNS
        # Of both files, an eighth.
        cache = bifolio.Cache(max(int(starts[-1]), 1 << 20))
        columns = cache.memmap(os.path.join(directory, "columns"), "<i4", "r")
        values = cache.memmap(os.path.join(directory, "values"), "<f4", "r")
        random = np.random.default_rng(2)
        total = np.zeros(width)
        count = 0
        begun = time.perf_counter()
        for _ in range(options.batches):
            rows = random.integers(0, len(starts) - 1, BATCH)
            lengths = starts[rows + 1] - starts[rows]
            found, offsets = values.gather(starts[rows], lengths)
            places, _ = columns.gather(starts[rows], lengths)
            np.add.at(total, places, found)
            assert len(found) == offsets[-1] == lengths.sum()
            count += len(found)
        each = (time.perf_counter() - begun) / options.batches
        print(f"{each * 1e3:.1f} ms a batch of {BATCH} rows; the bound is an eighth of the matrix")
        print(f"{count} elements read, whose sum is {total.sum():.1f}\n{cache.stats()}")
        cache.close()


if __name__ == "__main__":
    main()
