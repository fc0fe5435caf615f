"""Rows at random: bifolio beside numpy.memmap, h5py and zarr. Prints tables and draws plots.

    pip install matplotlib h5py zarr
    python doors/bifolio-python/benchmarks/plots.py --directory DIR --output docs/plots

All of it takes a quarter of an hour. `--only "8 x" --contenders bifolio,MADV_RANDOM,WILLNEED`
measures a part; `--prepare` only writes the data, which stays in the directory for later runs. With
`--results FILE` the rounds of several runs count together.

Each measurement is a process in a memory control group of its own (version 1, as root), whose limit
is what bifolio takes: the bound of the cache, 40 MiB for the interpreter and its libraries, and two
results. The others have the same, and what is left of it for the kernel's pages. All contenders of a
case follow each other in each round, with the kernel's pages of their file dropped before. The
tables have medians over the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BOUND = 128 << 20
ROOM = 40 << 20
BATCH = 256
SECONDS = 1.0
GROUPS = Path("/sys/fs/cgroup/memory")

CASES: dict[str, dict[str, Any]] = {
    "uniform, 1 KiB rows, 8 x": {"row": 1 << 10, "times": 8.0, "skew": False},
    "uniform, 4 KiB rows, 8 x": {"row": 4 << 10, "times": 8.0, "skew": False},
    "uniform, 16 KiB rows, 8 x": {"row": 16 << 10, "times": 8.0, "skew": False},
    "uniform, 64 KiB rows, 8 x": {"row": 64 << 10, "times": 8.0, "skew": False},
    "skewed, 4 KiB rows, 8 x": {"row": 4 << 10, "times": 8.0, "skew": True},
    "uniform, 4 KiB rows, fitting": {"row": 4 << 10, "times": 0.5, "skew": False},
}
CONTENDERS = ["bifolio", "memmap", "MADV_RANDOM", "WILLNEED", "h5py", "zarr"]


def rows_of(case: dict[str, Any]) -> int:
    return int(BOUND * case["times"]) // int(case["row"])


def path_of(directory: str, case: dict[str, Any], kind: str) -> str:
    return os.path.join(directory, f"{kind}-{case['row']}-{case['times']}")


def parts_of(case: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The rows of a case, some at a time, and the number of the first. Row `i` starts with `i`."""
    rows, width, step = rows_of(case), case["row"] // 8, (16 << 20) // case["row"]
    for start in range(0, rows, step):
        length = min(step, rows - start)
        part = np.random.default_rng(start).integers(0, 1 << 60, (length, width))
        part[:, 0] = range(start, start + len(part))
        yield start, part


def prepare(directory: str, case: dict[str, Any], kind: str) -> None:
    """Writes the data of a case in a format, unless it is there."""
    path = path_of(directory, case, kind)
    if os.path.exists(path):
        return
    unfinished = path + ".part"
    shape = (rows_of(case), case["row"] // 8)
    if kind == "h5":
        import h5py

        with h5py.File(unfinished, "w") as store:
            data = store.create_dataset("rows", shape, "i8")
            for start, part in parts_of(case):
                data[start : start + len(part)] = part
    elif kind == "zarr":
        import zarr

        chunks = (max((256 << 10) // case["row"], 1), shape[1])
        group = zarr.create_array(
            unfinished, shape=shape, chunks=chunks, dtype="i8", compressors=None, overwrite=True
        )
        for start, part in parts_of(case):
            group[start : start + len(part)] = part
    else:
        with open(unfinished, "wb") as file:
            for _, part in parts_of(case):
                file.write(part)
    os.sync()
    os.rename(unfinished, path)


def kind_of(contender: str) -> str:
    """The format that a contender reads."""
    return {"h5py": "h5", "zarr": "zarr"}.get(contender, "raw")


def forget(path: str) -> None:
    """Drops the kernel's pages of a file, or of all files of a directory."""
    for name in [Path(path), *Path(path).rglob("*")]:
        if not name.is_file():
            continue
        descriptor = os.open(name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def opened(directory: str, case: dict[str, Any], contender: str) -> Any:
    """Returns a function from indices to rows."""
    shape = (rows_of(case), case["row"] // 8)
    raw = path_of(directory, case, "raw")
    if contender == "bifolio":
        import bifolio

        array: Any = bifolio.Cache(BOUND).memmap(raw, "i8", "r", shape=shape)
        return lambda indices: array[indices]
    if contender == "h5py":
        import h5py

        data = h5py.File(path_of(directory, case, "h5"))["rows"]

        def read(indices: Any) -> Any:
            # Only indices in order, each once.
            unique, inverse = np.unique(indices, return_inverse=True)
            return data[unique][inverse]

        return read
    if contender == "zarr":
        import zarr

        group = zarr.open_array(path_of(directory, case, "zarr"), mode="r")
        return lambda indices: group.oindex[indices]
    array = np.memmap(raw, "i8", "r", shape=shape)
    memory = array._mmap
    if contender != "memmap":
        memory.madvise(mmap.MADV_RANDOM)
    if contender != "WILLNEED":
        return lambda indices: np.asarray(array[indices])

    def announced(indices: Any) -> Any:
        for index in indices.tolist():
            start = index * case["row"]
            page = start & -mmap.PAGESIZE
            memory.madvise(mmap.MADV_WILLNEED, page, start + case["row"] - page)
        return np.asarray(array[indices])

    return announced


def measure(
    directory: str, case: dict[str, Any], contender: str, seed: int, unlimited: bool
) -> Any:
    """Runs in the control group. Returns rows per second, and the memory over time."""
    rows = rows_of(case)
    random = np.random.default_rng(seed)
    order = np.random.default_rng(7).permutation(rows)
    before = resident()
    read = opened(directory, case, contender)

    def batch() -> Any:
        if case["skew"]:
            # Half of the rows are from a hundredth of all.
            return order[(rows * random.random(BATCH) ** 6.64).astype(np.int64)]
        return random.integers(0, rows, BATCH)

    if case["times"] < 1:
        for start in range(0, rows, BATCH):
            read(np.arange(start, min(start + BATCH, rows)))
    elif case["skew"]:
        # The hot rows come in.
        begun = time.perf_counter()
        while time.perf_counter() - begun < SECONDS:
            read(batch())
    curve, count, begun = [], 0, time.perf_counter()
    seconds = SECONDS * 4 if unlimited else SECONDS
    while (now := time.perf_counter() - begun) < seconds:
        indices = batch()
        found = read(indices)
        assert (found[:, 0] == indices).all()
        count += len(indices)
        curve.append((now, resident() - before))
    elapsed = time.perf_counter() - begun
    step = max(len(curve) // 100, 1)
    return {"rate": count / elapsed, "curve": curve[::step], "peak": max(y for _, y in curve)}


def run(directory: str, name: str, contender: str, seed: int, unlimited: bool = False) -> Any:
    case = CASES[name]
    forget(path_of(directory, case, kind_of(contender)))
    group = GROUPS / f"bifolio-python-{os.getpid()}"
    group.mkdir(exist_ok=True)
    try:
        limit = -1 if unlimited else BOUND + ROOM + 2 * BATCH * case["row"]
        (group / "memory.limit_in_bytes").write_text(str(limit))
        arguments = [directory, name, contender, str(seed), str(int(unlimited))]
        command = [sys.executable, __file__, "--child", *arguments]

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter)
        left = limit - int((group / "memory.max_usage_in_bytes").read_text())
        if done.returncode:
            return {"rate": 0.0, "curve": [], "peak": 0, "left": left, "error": done.stderr[-300:] or "killed"}
        return {**json.loads(done.stdout), "left": left}
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def draw(results: Any, curves: Any, output: Path, machine: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "bifolio"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6))
    for contender, result in curves.items():
        points = [(x, y / (1 << 20)) for x, y in result["curve"]]
        axes.plot(*zip(*points, strict=True), label=contender)
    axes.axhline(BOUND >> 20, color="gray", linestyle=":", label="the bound")
    axes.set(xlabel="seconds", ylabel="resident memory, MiB", title="uniform 4 KiB rows of 1 GiB")
    axes.legend()
    figure.text(0.01, 0.01, machine, fontsize=6)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(output / "python-memory.svg", metadata={"Date": None})
    for file in ("uniform", "skewed"):
        wanted = [name for name in CASES if file in name]
        figure, axes = plt.subplots(figsize=(7, 1.2 + 1.1 * len(wanted)))
        height = 0.8 / len(CONTENDERS)
        for number, contender in enumerate(CONTENDERS):
            rates = [results[name][contender] for name in wanted]
            middle = [statistics.median(rate) for rate in rates]
            spread = [
                [m - min(rate) for m, rate in zip(middle, rates, strict=True)],
                [max(rate) - m for m, rate in zip(middle, rates, strict=True)],
            ]
            places = np.arange(len(wanted)) + number * height
            axes.barh(places, middle, height, xerr=spread, label=contender)
        axes.set_yticks(np.arange(len(wanted)) + 0.4, wanted)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="rows per second")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
        figure.text(0.01, 0.01, machine, fontsize=6)
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.savefig(output / f"python-{file}.svg", metadata={"Date": None})


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        directory, name, contender, seed, unlimited = sys.argv[2:]
        found = measure(directory, CASES[name], contender, int(seed), bool(int(unlimited)))
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--directory", required=True, help="where the data goes (13 GiB)")
    parser.add_argument("--output", type=Path, help="where the plots go; else none are drawn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="some, beside bifolio")
    parser.add_argument("--results", type=Path, help="results of earlier runs, which it adds to")
    parser.add_argument("--prepare", action="store_true", help="only writes the data")
    options = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if options.only in name}
    contenders = [name for name in CONTENDERS if name in ["bifolio", *options.contenders.split(",")]]
    if options.output and (cases != CASES or contenders != CONTENDERS):
        parser.error("plots are drawn of all cases and contenders")
    for case in cases.values():
        for kind in sorted({kind_of(contender) for contender in contenders}):
            prepare(options.directory, case, kind)
    if options.prepare:
        return
    results: dict[str, dict[str, list[float]]] = {
        name: {contender: [] for contender in contenders} for name in cases
    }
    peaks: list[int] = []
    left: list[int] = []
    if options.results and options.results.exists():
        results, peaks, left = json.loads(options.results.read_text())
    done = len(next(iter(results.values()))["bifolio"])
    for number in range(done, done + options.rounds):
        for name in cases:
            for contender in contenders:
                found = run(options.directory, name, contender, number)
                if "error" in found:
                    print(f"{name}, {contender}: {found['error']}", file=sys.stderr)
                results[name][contender].append(found["rate"])
                if contender == "bifolio":
                    peaks.append(found["peak"])
                    left.append(found["left"])
    if options.results:
        options.results.write_text(json.dumps([results, peaks, left]))
    processor = next(
        line.split(":")[1].strip()
        for line in subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
        if line.startswith("Model name")
    )
    machine = (
        f"{processor}, {os.cpu_count()} CPUs, Linux {os.uname().release}, numpy {np.__version__}, "
        f"{time.strftime('%Y-%m-%d')}, {done + options.rounds} rounds"
    )
    print(f"{machine}\n\n| rows per second | {' | '.join(contenders)} |")
    print("|---" * (len(contenders) + 1) + "|")
    for name, rates in results.items():
        cells = [
            f"{statistics.median(rate):,.0f} ({min(rate):,.0f} to {max(rate):,.0f})"
            for rate in rates.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n| bifolio over | {' | '.join(contenders[1:])} |")
    print("|---" * len(contenders) + "|")
    for name, rates in results.items():
        ratios = []
        for contender in contenders[1:]:
            pairs = zip(rates["bifolio"], rates[contender], strict=True)
            each = [mine / theirs for mine, theirs in pairs if theirs]
            middle = statistics.median(each) if each else 0
            ratios.append(f"{middle:.2f} ({min(each):.2f} to {max(each):.2f})" if each else "-")
        print(f"| {name} | {' | '.join(ratios)} |")
    peak = max(peaks) / (1 << 20)
    print(f"\nresident, bifolio: at most {peak:.1f} MiB more, with a bound of {BOUND >> 20};")
    print(f"of the limit of its control group, {min(left) / (1 << 20):.1f} MiB were left at least")
    if options.output:
        wanted = ("bifolio", "memmap", "MADV_RANDOM", "h5py")
        name = "uniform, 4 KiB rows, 8 x"
        curves = {each: run(options.directory, name, each, 0, unlimited=True) for each in wanted}
        draw(results, curves, options.output, machine)


if __name__ == "__main__":
    main()
