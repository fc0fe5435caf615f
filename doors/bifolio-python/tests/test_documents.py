"""The examples of the documentation and of the folder `examples` are run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

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


def test_tokens(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "tokens.py"), "--megabytes", "8", "--steps", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses[0] > 4 and losses[-1] < 2, done.stdout
    assert "file is 8 x the bound" in done.stdout


def test_sparse(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "sparse.py"), "--rows", "2000", "--batches", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "elements read" in done.stdout
