"""Caches and files for the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bifolio

# A job in the background of a shell ignores it, and so would the programs of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A path where no file is."""
    return str(tmp_path / "data")


@pytest.fixture
def cache() -> Iterator[bifolio.Cache]:
    """A small cache."""
    cache = bifolio.Cache("4 MiB")
    yield cache
    cache.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs a program with arguments in a process of its own, and returns what it printed."""

    def run(program: str, *arguments: str, timeout: float = 60, status: int = 0) -> str:
        file = tmp_path / "program.py"
        file.write_text(program)
        command = [sys.executable, "-W", "ignore::DeprecationWarning", str(file), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ}
        )
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run
