"""CPU time of single calls with the data in memory: bifolio beside numpy.memmap.

    python doors/bifolio-python/benchmarks/calls.py [--rounds 9] [--directory DIR]

Both follow each other in each round, on the same file, for the same indices. Prints medians over
the rounds in microseconds of CPU time of the process, and their ratio, memmap over bifolio: above 1
bifolio takes less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import bifolio

BATCH = 256
#: Length of the data of each case, bytes: it fits both the cache and the kernel's memory.
DATA = 32 << 20
#: Batches of indices that take turns: what they read is more than the caches of the processor hold.
BATCHES = 64
SECONDS = 0.1

Call = Callable[[Any], Any]


def cost(call: Call, arguments: list[Any]) -> float:
    """Microseconds of CPU time of a call."""
    count, begun = 0, time.process_time()
    while (now := time.process_time()) - begun < SECONDS:
        for argument in arguments:
            call(argument)
        count += len(arguments)
    return (now - begun) / count * 1e6


def compare(name: str, rounds: int, ours: Call, theirs: Call, arguments: list[Any]) -> None:
    pairs = [(cost(ours, arguments), cost(theirs, arguments)) for _ in range(rounds)]
    mine, memmap = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    middle = statistics.median(ratios)
    print(
        f"| {name} | {mine:.2f} | {memmap:.2f} | {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
        flush=True,
    )


def rows(directory: str, rounds: int) -> None:
    """Batches of rows, and single ones."""
    random = np.random.default_rng(1)
    for row, kind in ((256, "raw"), (4096, "raw"), (4096, "foreign .npy"), (4096, "own .npy")):
        path = os.path.join(directory, f"{row}-{kind}")
        shape = (DATA // row, row // 8)
        values = random.integers(0, 1 << 60, shape)
        cache = bifolio.Cache("128 MiB")
        array: Any
        mapped: Any
        if kind == "raw":
            values.tofile(path)
            array = cache.memmap(path, "i8", "r", shape=shape)
            mapped = np.memmap(path, "i8", "r", shape=shape)
        else:
            if kind == "own .npy":
                with cache.open_array(path, "w+", dtype="i8", shape=shape) as new:
                    new[...] = values
            else:
                with open(path, "wb") as file:
                    np.save(file, values)
            array, mapped = cache.open_array(path), np.load(path, mmap_mode="r")
        assert (array[...] == mapped).all()
        for batch in (BATCH, 32):
            batches = [random.integers(0, shape[0], batch) for _ in range(BATCHES)]
            name = f"`a[indices]`, {batch} rows of {row} B, {kind}"
            compare(name, rounds, array.__getitem__, mapped.__getitem__, batches)
        if kind == "raw":
            numbers = random.integers(0, shape[0], 512).tolist()
            compare(f"`a[k]`, {row} B", rounds, array.__getitem__, lambda k: np.array(mapped[k]), numbers)
            slices = [slice(k, k + 16) for k in numbers]
            name = f"`a[i:i + 16]`, rows of {row} B"
            compare(name, rounds, array.__getitem__, lambda k: np.array(mapped[k]), slices)
        cache.close()
        os.unlink(path)


def windows(directory: str, rounds: int) -> None:
    """A batch of nanoGPT: 64 windows of 257 tokens."""
    path = os.path.join(directory, "tokens")
    random = np.random.default_rng(2)
    random.integers(0, 50_000, DATA // 2, np.uint16).tofile(path)
    cache = bifolio.Cache("128 MiB")
    tokens: Any = cache.memmap(path, "u2", "r")
    for _ in tokens.chunks():
        pass
    view = np.lib.stride_tricks.sliding_window_view(np.memmap(path, "u2", "r"), 257)
    batches = [random.integers(0, DATA // 2 - 257, 64) for _ in range(BATCHES)]
    name = "`a.gather(starts, 257)`, 64 starts; memmap: `sliding_window_view`"
    compare(name, rounds, lambda starts: tokens.gather(starts, 257), view.__getitem__, batches)
    cache.close()
    os.unlink(path)


def lines(directory: str, rounds: int) -> None:
    """A loop over the lines of a file, beside the files of Python itself."""
    path = os.path.join(directory, "lines")
    lengths = np.random.default_rng(3).integers(20, 180, 40_000)
    with open(path, "wb") as target:
        target.writelines(b"x" * length + b"\n" for length in lengths.tolist())
    cache = bifolio.Cache("128 MiB")

    def read(file: Any) -> None:
        with file:
            assert sum(1 for _ in file) == len(lengths)

    name = "`for line in cache.open(p)`, 40,000 lines of 100 B; `open(p, 'rb')`"
    kept = cache.open(path)
    compare(name, rounds, lambda _: read(cache.open(path)), lambda _: read(open(path, "rb")), [0])
    kept.close()
    cache.close()
    os.unlink(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--directory", help="where the data goes (32 MiB); a new one if not given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--hot", action="store_true", help="the same batch again: from the caches of the processor"
    )
    options = parser.parse_args()
    if options.hot:
        globals()["BATCHES"] = 1
    print("| call | bifolio, us | memmap, us | memmap / bifolio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows(directory, options.rounds)
        windows(directory, options.rounds)
        lines(directory, options.rounds)


if __name__ == "__main__":
    main()
