"""What careless programs do: signals, odd orders, cut files, full disks, ten thousand opens."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import bifolio


def test_an_interrupt_ends_a_long_read(run: Callable[..., str], path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(8 << 30)
    printed = run(
        """
import os, signal, sys, threading, time
import numpy as np, bifolio
cache = bifolio.Cache("16 MiB")
array = cache.memmap(sys.argv[1], "u1", "r")
out = np.empty(1 << 26, "u1")
indices = np.random.default_rng(1).integers(0, len(array) >> 12, 5_000_000) << 12
for call in (
    lambda: [array.take(np.arange(1 << 26), out=out) for _ in range(1000)],
    lambda: array[indices],
    lambda: [array[:: 1 << 12] for _ in range(1000)],
    lambda: [chunk[0] for _ in range(1000) for chunk in array.chunks()],
):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    try:
        call()
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted", "late" if time.monotonic() - start > 15 else "in time")
assert array[12345] == 0
""",
        path,
        timeout=100,
    )
    assert printed.split("\n")[:4] == ["interrupted in time"] * 4, printed


def test_objects_go_in_any_order(path: str) -> None:
    for order in ("cache first", "array first", "cycle", "view last", "closed twice"):
        cache = bifolio.Cache("2 MiB")
        array = cache.open_array(path, "w+", dtype="i4", shape=(1000,))
        array[:] = 7
        view = array.T
        if order == "cache first":
            # An array keeps its cache.
            del cache
            assert array[5] == 7
        elif order == "cycle":
            cycle = [array, cache]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
        elif order == "view last":
            del array, cache
            gc.collect()
            assert view[999] == 7
        elif order == "closed twice":
            array.close()
            array.close()
            cache.close()
            cache.close()
            with pytest.raises(ValueError, match="closed"):
                view[0]
        view = array = cache = None  # type: ignore[assignment]
        gc.collect()
        assert (np.load(path) == 7).all(), order


def test_the_end_of_the_interpreter_writes(run: Callable[..., str], path: str) -> None:
    program = """
import sys, bifolio
cache = bifolio.Cache("2 MiB", flush_seconds=600)
array = cache.open_array(sys.argv[1], "w+", dtype="i4", shape=(10, 1000))
array[:] = 5
array.append([[6] * 1000])
file = cache.open(sys.argv[1] + ".file", "wb")
file.write(b"bytes")
{end}
"""
    for end in ("", "raise SystemExit(3)", "keep = [array]; keep.append(keep)"):
        run(program.format(end=end), path, status=3 if "3" in end else 0)
        assert Path(path + ".file").read_bytes() == b"bytes"
        found = np.load(path)
        assert (found[:10] == 5).all() and found.shape[0] == 11, end


def test_a_worker_that_ends_writes(run: Callable[..., str], path: str) -> None:
    program = """
import multiprocessing, sys, bifolio
cache = bifolio.Cache("2 MiB", flush_seconds=600)
def work(path):
    file = cache.open(path, "wb")
    file.write(b"from a worker")
    global keep
    keep = file
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[2]).Process(target=work, args=(sys.argv[1],))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    for method in ("fork", "spawn"):
        run(program, path, method)
        assert Path(path).read_bytes() == b"from a worker"
        os.unlink(path)


def test_a_file_that_is_cut_meanwhile(path: str) -> None:
    cache = bifolio.Cache("1 MiB")
    np.arange(1 << 20, dtype="i8").tofile(path)
    array = cache.memmap(path, "i8", "r")
    assert array[5] == 5
    os.truncate(path, 4096)
    for call in (
        lambda: array[1 << 19],
        lambda: array[np.array([3, 1 << 19])],
        lambda: array[::2],
        lambda: array.take([1 << 19]),
    ):
        # With numpy.memmap, this is SIGBUS.
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO and caught.value.filename == path
    assert array[100] == 100
    os.unlink(path)
    assert array[200] == 200
    cache.close()


def test_ten_thousand_opens(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cache = bifolio.Cache("4 MiB")
    np.save(tmp_path / "a.npy", np.arange(100))
    # One after the other, and many handles of one file.
    for number in range(10_000):
        array = cache.open_array(tmp_path / "a.npy")
        assert array[number % 100] == number % 100
    arrays = [cache.open_array(tmp_path / "a.npy") for _ in range(10_000)]
    assert sum(int(array[1]) for array in arrays) == 10_000
    del arrays
    # Many files, until there are no descriptors.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    files = []
    try:
        with pytest.raises(OSError) as caught:
            for number in range(1000):
                files.append(cache.open(tmp_path / f"{number}", "wb"))
        assert caught.value.errno == errno.EMFILE
        files[0].write(b"still works")
        files[0].close()
        cache.open(tmp_path / "one more", "wb").close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    cache.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; its tests are skipped where it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(4 << 20)
    made = subprocess.run(["mkfs.ext4", "-qF", str(image)], capture_output=True)
    mounted = made.returncode == 0 and not subprocess.run(
        ["mount", "-o", "loop", str(image), str(place)], capture_output=True
    ).returncode
    if not mounted:
        pytest.skip("no file system can be mounted")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_at_flush(small_disk: Path) -> None:
    cache = bifolio.Cache("32 MiB", flush_seconds=600)
    path = str(small_disk / "array")
    array = cache.memmap(path, "u1", "w+", shape=(8 << 20,))
    array[:] = 7
    with pytest.raises(OSError) as caught:
        array.flush()
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == path
    # Nothing is lost: what was assigned is still read.
    assert (array[:: 1 << 12] == 7).all()
    with pytest.raises(OSError):
        array.close()
    with pytest.raises(OSError):
        cache.close()
    # What does not fit is given up, and the rest is written.
    with cache.open(path, "r+b") as file:
        file.truncate(1 << 20)
    cache.close()
    assert Path(path).read_bytes() == b"\7" * (1 << 20)


def test_a_file_that_cannot_be_written(small_disk: Path) -> None:
    path = small_disk / "array"
    path.write_bytes(bytes(1000))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    cache = bifolio.Cache("1 MiB")
    for mode in ("r+", "w+"):
        with pytest.raises(OSError) as caught:
            cache.memmap(path, "u1", mode, shape=(1000,))
        assert caught.value.errno == errno.EROFS and caught.value.filename == str(path)
    array = cache.memmap(path, "u1", "r")
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        array.append([1])
    array.flush()
    cache.close()


def test_threads_that_close_while_others_read(path: str) -> None:
    np.arange(1 << 18, dtype="i8").tofile(path)
    for _ in range(20):
        cache = bifolio.Cache("1 MiB")
        array = cache.memmap(path, "i8", "r")
        errors: list[BaseException] = []

        def read() -> None:
            random = np.random.default_rng(3)
            try:
                while True:
                    where = random.integers(0, 1 << 18, 300)
                    assert (array[where] == where).all()
            except ValueError:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        array.close() if _ % 2 else cache.close()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        cache.close()


def test_memory_stays_within_the_bound(run: Callable[..., str], path: str) -> None:
    with open(path, "wb") as file:
        file.write(os.urandom(1 << 20) * 256)
    printed = run(
        """
import sys
import numpy as np, bifolio
def resident():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["VmRSS"].split()[0]) << 10
array = np.memmap(sys.argv[1], "u1", "r")
del array
before = resident()
cache = bifolio.Cache("32 MiB")
array = cache.memmap(sys.argv[1], "i8", "r", shape=(1 << 16, 512))
random = np.random.default_rng(1)
highest = 0
for _ in range(300):
    array[random.integers(0, len(array), 256)]
    highest = max(highest, resident())
for chunk in array.chunks(256):
    highest = max(highest, resident())
print(highest - before, cache.stats()["memory_used_bytes"])
""",
        path,
        timeout=100,
    )
    grown, used = map(int, printed.split())
    assert used <= 32 << 20
    # And 4 MiB for the arrays that the program itself has at a time.
    assert grown <= (32 << 20) * 1.02 + (8 << 20) + (4 << 20), grown


def test_tuples_shapes_and_scalars_of_other_types(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype=np.uint8, shape=(np.int64(4), 3))
    # numpy 1 only warns.
    with pytest.raises((OverflowError, DeprecationWarning)):
        array[0, 0] = 300
    with pytest.raises(ValueError, match="could not broadcast"):
        array[0] = np.zeros(5)
    with pytest.raises(ValueError):
        array[0] = "words"
    array[0] = array[1:2] + 5
    array[np.int8(1), ...] = [1, 2, 3]
    assert array[:2].tolist() == [[5, 5, 5], [1, 2, 3]]
    assert len(array) == 4 and array.T.shape == (3, 4)
    with pytest.raises(TypeError):
        hash(array)
    with pytest.raises(ValueError):
        cache.open_array(path, dtype="u1")
    with pytest.raises(ValueError):
        cache.open_array(path + "2", "w+", dtype="u1")
    with pytest.raises(ValueError, match="negative"):
        cache.open_array(path + "2", "w+", dtype="u1", shape=(-1,))
    with pytest.raises(ValueError, match="Python objects"):
        cache.open_array(path + "2", "w+", dtype=object, shape=(1,))
    assert not os.path.exists(path + "2")
