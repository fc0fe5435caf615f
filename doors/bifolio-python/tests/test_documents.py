"""The examples of the documentation and of the folder `examples` are run."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import bifolio
from bifolio import _array, _cache, _sizes

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    "module", [bifolio, _array, _cache, _sizes], ids=lambda module: module.__name__
)
def test_examples_of_docstrings(module: object, tmp_path: Path) -> None:
    names = {**vars(bifolio), "path": str(tmp_path / "array.npy")}
    found = doctest.testmod(module, extraglobs=names)  # type: ignore[arg-type]
    assert found.failed == 0 and found.attempted > 0


def run_example(name: str, *options: str, directory: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tokens(tmp_path: Path) -> None:
    printed = run_example("tokens.py", "--megabytes", "8", "--steps", "60", directory=tmp_path)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "loss" in line]
    assert losses[0] > 4 and losses[-1] < 2, printed
    assert "file is 8 x the bound" in printed


def test_sparse(tmp_path: Path) -> None:
    printed = run_example("sparse.py", "--rows", "2000", "--batches", "5", directory=tmp_path)
    count, total = re.findall(r"(\d+) elements read, whose sum is ([\d.]+)", printed)[0]
    assert int(count) == float(total) > 0


def test_sparse_reads_the_files_of_anndata(tmp_path: Path) -> None:
    """An `.h5ad` file as anndata 0.12 writes it: in chunks, here compressed, of 64-bit types."""
    random = np.random.default_rng(1)
    dense = random.integers(1, 99, (500, 300)) * (random.random((500, 300)) < 0.2)
    starts = np.concatenate([[0], np.cumsum((dense > 0).sum(axis=1))])
    with h5py.File(tmp_path / "cells.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": dense.shape})
        options = {"maxshape": (None,), "compression": "gzip"}
        matrix.create_dataset("data", data=dense[dense > 0].astype("f8"), **options)
        matrix.create_dataset("indices", data=np.nonzero(dense)[1], **options)
        matrix.create_dataset("indptr", data=starts, **options)
    options_given = ("--h5ad", "cells.h5ad", "--batches", "4")
    printed = run_example("sparse.py", *options_given, directory=tmp_path)
    generator = np.random.default_rng(2)
    rows = np.concatenate([generator.integers(0, 500, 256) for _ in range(4)])
    assert f"{(dense[rows] > 0).sum()} elements read, whose sum is {dense[rows].sum():.1f}" in printed


def test_rerank(tmp_path: Path) -> None:
    options = ("--vectors", "20000", "--queries", "40")
    printed = run_example("rerank.py", *options, directory=tmp_path)
    assert float(re.findall(r"first found for (\d+)%", printed)[0]) >= 95, printed


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs(tmp_path: Path, workers: int) -> None:
    if workers:
        pytest.importorskip("torch.utils.data", reason="torch is not installed")
    options = ("--rows", "8000", "--workers", str(workers))
    printed = run_example("epochs.py", *options, directory=tmp_path)
    rights = [float(right) for right in re.findall(r"epoch \d: ([\d.]+)% right", printed)]
    assert len(rights) == 3 and rights[0] < rights[-1] > 80, printed
