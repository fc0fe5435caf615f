"""What reaches the file when the host acts on the process: forks, pickles, closes, interrupts, ends.

Other readers, such as `numpy.load` or another process, are compared with what was promised.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_workers import in_child

import bifolio


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; its tests are skipped where it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def rows_of(path: str | Path) -> int:
    """Rows that a reader of the file finds, all of which must be there."""
    with open(path, "rb") as file:
        return int(np.load(file).shape[0])


# Forks.


def test_a_closed_cache_does_not_keep_others_from_a_fork(path: str) -> None:
    """An array of a closed cache, which is still referenced, ends no loop over files."""
    kept = []
    for number in range(20):
        closed = bifolio.Cache("1 MiB")
        kept.append(closed.memmap(path + f".{number}", "u1", "w+", shape=(10,)))
        kept[-1][:] = 1
        closed.close()
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    arrays = [cache.memmap(f"{path}{n}", "i4", "w+", shape=(1000,)) for n in range(20)]
    for array in arrays:
        array[:] = 5
    assert in_child(lambda: [int(array[:].sum()) for array in arrays]) == [5000] * 20
    cache.close()


def test_a_child_never_reads_old_bytes_of_a_file_that_could_not_be_passed_on(
    full_disk: Path, path: str
) -> None:
    cache = bifolio.Cache("16 MiB", flush_seconds=600)
    good = [cache.memmap(f"{path}{n}", "i4", "w+", shape=(1000,)) for n in range(10)]
    bad = cache.memmap(full_disk / "bad", "u1", "w+", shape=(8 << 20,))
    reader = cache.memmap(full_disk / "bad", "u1", "r")
    good += [cache.memmap(f"{path}{n}", "i4", "w+", shape=(1000,)) for n in range(10, 20)]
    bad[:] = 7
    for array in good:
        array[:] = 3

    def body() -> Any:
        sums = [int(array[:].sum()) for array in good]
        for _ in range(2):
            for array in (bad, reader):
                with pytest.raises(OSError, match="could not be passed on") as caught:
                    array[0]
                assert caught.value.errno == errno.ENOSPC
                assert caught.value.filename == str(full_disk / "bad")
        # Nor by another name, in a grandchild, or in a pickle.
        with pytest.raises(OSError, match="could not be passed on"):
            cache.open(full_disk / "bad")
        with pytest.raises(OSError, match="could not be passed on"):
            in_child(lambda: int(bad[0]))
        return sums

    for _ in range(2):
        assert in_child(body) == [3000] * 20
    # Once there is room, the next child reads.
    with cache.open(full_disk / "bad", "r+b") as file:
        file.truncate(1 << 16)
    assert in_child(lambda: int(bad[0])) == 7
    cache.close()


def test_a_file_whose_close_failed_is_not_read_by_a_child(full_disk: Path) -> None:
    cache = bifolio.Cache("16 MiB", flush_seconds=600)
    path = full_disk / "bad"
    array = cache.memmap(path, "u1", "w+", shape=(8 << 20,))
    array[:] = 7
    with pytest.raises(OSError):
        array.close()
    assert array._handle.is_closed

    def body() -> None:
        with pytest.raises(OSError):
            cache.open(path)

    in_child(body)
    with cache.open(path, "r+b") as file:
        file.truncate(1 << 16)
    cache.close()
    assert path.read_bytes() == b"\7" * (1 << 16)


def test_a_fork_beside_a_thread_that_flushes(path: str) -> None:
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    array = cache.memmap(path, "i8", "w+", shape=(1000,))
    stop = threading.Event()

    def flush() -> None:
        while not stop.is_set():
            array.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        for number in range(150):
            array[:] = number
            seen = in_child(lambda: (int(array[:].min()), int(array[:].max())))
            assert seen == (number, number)
    finally:
        stop.set()
        thread.join()
    cache.close()


def test_a_worker_does_not_read_a_file_that_was_replaced(path: str) -> None:
    cache = bifolio.Cache("8 MiB")
    array = cache.memmap(path, "i4", "w+", shape=(10,))
    np.zeros(10, "i4").tofile(path + ".new")
    os.replace(path + ".new", path)

    def body() -> None:
        with pytest.raises(OSError, match="was replaced") as caught:
            array[0]
        assert caught.value.errno == errno.ESTALE

    in_child(body)
    cache.close()


def test_a_pickle_of_a_reader_passes_on_what_a_writer_wrote(path: str) -> None:
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    writer = cache.memmap(path, "i4", "w+", shape=(1000,))
    reader = cache.memmap(path, "i4", "r")
    writer[:] = 5
    pickle.dumps(reader)
    assert (np.fromfile(path, "i4") == 5).all()
    cache.close()


def test_the_last_reference_says_what_it_could_not_write(
    run: Callable[..., str], full_disk: Path
) -> None:
    program = """
import sys, bifolio
cache = bifolio.Cache("64 MiB", flush_seconds=600)
file = cache.open(sys.argv[1], "wb")
file.write(bytes(8 << 20))
del file
print("dropped", file=sys.stderr)
array = cache.memmap(sys.argv[1] + "2", "u1", "w+", shape=(8 << 20,))
array[:] = 5
del array
print("dropped, too", file=sys.stderr)
"""
    first, second = run(program, str(full_disk / "bad")).split("dropped\n")
    for printed in (first, second.split("dropped, too")[0]):
        assert "No space left" in printed and str(full_disk / "bad") in printed


# Headers.


def act_fork(array: bifolio.Array) -> None:
    assert in_child(lambda: array.shape[0]) == array.shape[0]


def act_flush_in_thread(array: bifolio.Array) -> None:
    thread = threading.Thread(target=array.flush)
    thread.start()
    thread.join()


ACTS: list[Callable[[bifolio.Array], Any]] = [
    act_fork,
    pickle.dumps,
    copy.deepcopy,
    act_flush_in_thread,
    lambda array: array.cache.open(array.filename, "r+b").flush(),
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("end", ["cache", "array", "del"])
def test_rows_reach_the_header_whatever_happened_before(
    path: str, act: Callable[[bifolio.Array], Any], end: str
) -> None:
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    array = cache.open_array(path, "w+", dtype="i4", shape=(0, 3))
    for number in range(30):
        array.append(np.full((100, 3), number))
        act(array)
    array.append(np.full((1, 3), 77))
    if end == "cache":
        cache.close()
    elif end == "array":
        array.close()
    del array
    gc.collect()
    assert rows_of(path) == 3001
    cache.close()


def test_a_new_array_takes_the_header_of_the_old_one_away(path: str) -> None:
    """A cell of a notebook that is run twice: the old array goes after the new one was made."""
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    for dtype, columns in (("f8", 3), ("i4", 7)):
        old = array = cache.open_array(path, "w+", dtype=dtype, shape=(0, columns))
        array.append(np.ones((1000, columns), dtype))
        array = cache.open_array(path, "w+", dtype="u1", shape=(5, 2))
        array[:] = 9
        with pytest.raises(ValueError, match="created anew"):
            old.append(np.ones((1, columns), dtype))
        old.close()
        del old
        gc.collect()
        array.flush()
        assert np.load(path).tolist() == [[9, 9]] * 5
        array.append(np.full((1, 2), 8, "u1"))
        array.close()
        assert np.load(path).tolist() == [[9, 9]] * 5 + [[8, 8]]
    # Nor over a raw file.
    array = cache.open_array(path, "w+", dtype="f8", shape=(0, 3))
    array.append(np.ones((1000, 3)))
    with cache.open(path, "wb") as file:
        file.write(b"a text of its own")
    del array
    cache.close()
    assert Path(path).read_bytes() == b"a text of its own"


def test_two_arrays_of_one_file_append(path: str) -> None:
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    one = cache.open_array(path, "w+", dtype="i4", shape=(0, 2))
    one.append([[1, 1]] * 10)
    two = cache.open_array(path, "r+")
    assert two.shape == (10, 2)
    two.append([[2, 2]] * 5)
    one.append([[3, 3]])
    assert one.shape == (16, 2) and one[:, 0].tolist() == [1] * 10 + [2] * 5 + [3]
    two.close()
    assert rows_of(path) == 16
    one.append([[4, 4]])
    cache.close()
    assert rows_of(path) == 17


def test_a_header_never_counts_rows_that_are_not_there(path: str) -> None:
    """Beside a thread that appends, each flush writes a header of rows that it wrote before."""
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    array = cache.open_array(path, "w+", dtype="i4", shape=(0, 1000))
    array.flush()
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        last = 0
        try:
            while not stop.is_set():
                with open(path, "rb") as file:
                    version = np.lib.format.read_magic(file)
                    assert version == (1, 0)
                    shape, _, _ = np.lib.format.read_array_header_1_0(file)
                    base = file.tell()
                assert os.path.getsize(path) >= base + shape[0] * 4000
                assert shape[0] >= last
                last = shape[0]
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    def flush() -> None:
        while not stop.is_set():
            array.flush()

    threads = [threading.Thread(target=target) for target in (read, flush, flush)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1000):
            array.append(np.full((3, 1000), number))
            if number % 50 == 0:
                array.flush()
                assert rows_of(path) == 3 * number + 3
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    cache.close()
    assert rows_of(path) == 3000


def test_a_failed_close_keeps_rows_and_header(full_disk: Path) -> None:
    cache = bifolio.Cache("16 MiB", flush_seconds=600)
    path = full_disk / "array.npy"
    (full_disk / "filler").write_bytes(bytes(900 << 10))
    array = cache.open_array(path, "w+", dtype="u1", shape=(0, 1 << 10))
    array.append(np.full((500, 1 << 10), 5, "u1"))
    with pytest.raises(OSError):
        array.flush()
    assert rows_of(path) == 0
    with pytest.raises(OSError):
        array.close()
    del array
    with pytest.raises(OSError):
        cache.close()
    assert not cache.closed and rows_of(path) == 0
    os.unlink(full_disk / "filler")
    cache.close()
    assert (np.load(path) == 5).all() and rows_of(path) == 500


@pytest.mark.parametrize(
    "call",
    [
        lambda array, file: array.flush(),
        lambda array, file: array.close(),
        lambda array, file: pickle.dumps(array),
        lambda array, file: array.cache.open_array(array.filename, "w+", dtype="u1", shape=(1, 1)),
        lambda array, file: file.flush(),
        lambda array, file: file.sync(),
        lambda array, file: file.close(),
        lambda array, file: array.cache.close(),
    ],
    ids=["flush", "close", "pickle", "w+", "file.flush", "file.sync", "file.close", "cache.close"],
)
def test_a_failure_of_before_is_none_of_a_call_that_succeeds(
    full_disk: Path, call: Callable[..., object]
) -> None:
    """What a write-back in the background could not do, or another object, this call does."""
    cache = bifolio.Cache("16 MiB", flush_seconds=600)
    path = full_disk / "array.npy"
    first = cache.open_array(path, "w+", dtype="u1", shape=(500, 1 << 10))
    array, file = cache.open_array(path, "r+"), cache.open(path, "r+b")
    (full_disk / "filler").write_bytes(bytes(900 << 10))
    array[:] = 5
    with pytest.raises(OSError):
        first.flush()
    os.unlink(full_disk / "filler")
    call(array, file)
    if len(found := np.load(path)) > 1:
        assert (found == 5).all()
    cache.close()


FAILED_FLUSHES = """
import ctypes, errno, gc, os, platform, struct, sys
import bifolio, numpy as np

disk = sys.argv[1]
cache = bifolio.Cache("16 MiB", flush_seconds=600)
path, calls = f"{disk}/array.npy", []
array = cache.open_array(path, "w+", dtype="u1", shape=(0, 1024))
twin, file = cache.open_array(path, "r+"), cache.open(path, "r+b")
with open(f"{disk}/filler", "wb") as filler:
    filler.truncate(0)
    os.posix_fallocate(filler.fileno(), 0, 900 << 10)
array.append(np.full((500, 1024), 5, "u1"))
try:
    array.flush()
    print("stored")
except OSError as error:
    print(error.errno == errno.ENOSPC)
os.unlink(f"{disk}/filler")


def refuse(numbers):
    # A filter (seccomp): the kernel refuses these system calls of this thread with EIO.
    load, is_equal, answer = 0x20, 0x15, 0x06
    lines = [(load, 0, 0, 0)]
    for place, number in enumerate(numbers):
        lines.append((is_equal, len(numbers) - place, 0, number))
    lines += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EIO)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    kept = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(kept)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    assert prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0, "PR_SET_NO_NEW_PRIVS"
    assert prctl(22, ctypes.c_ulong(2), ctypes.byref(program), zero, zero) == 0, "PR_SET_SECCOMP"


refuse({"x86_64": [74, 75], "aarch64": [82, 83]}[platform.machine()])  # fsync, fdatasync
for call in (array.flush, array.flush, twin.flush, file.sync, file.close, array.close, cache.close):
    try:
        call()
        print("a failed flush is not told of:", call)
    except OSError as error:
        print(error.errno == errno.EIO)
"""


def test_every_call_that_makes_durable_is_told_of_a_failed_flush(
    full_disk: Path, run: Callable[..., str]
) -> None:
    """Also after a failed write-back: what the disk took since then may not be durable."""
    told = run(FAILED_FLUSHES, str(full_disk)).splitlines()
    assert told[:8] == ["True"] * 8
    assert rows_of(full_disk / "array.npy") == 0, "a header of rows that may be lost"


# Appends that do not end.


def test_an_append_after_a_kill(run: Callable[..., str], path: str) -> None:
    program = """
import os, signal, sys, bifolio
cache = bifolio.Cache("8 MiB", flush_seconds=600)
array = cache.open_array(sys.argv[1], "w+", dtype="i4", shape=(0, 3))
array.append([[1, 1, 1]] * 10)
array.flush()
array.append([[2, 2, 2]] * 5000)
file = cache.open(sys.argv[1], "r+b"); file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(program, path, status=-signal.SIGKILL)
    assert rows_of(path) == 10 and os.path.getsize(path) > 60_000
    cache = bifolio.Cache("8 MiB")
    with cache.open_array(path, "r+") as array:
        assert array.shape == (10, 3)
        array.append([[3, 3, 3]])
    assert np.load(path)[:, 0].tolist() == [1] * 10 + [3]
    with open(path, "ab") as file:
        file.write(b"part of a row")
    with cache.open_array(path, "r+", repair=True):
        pass
    assert os.path.getsize(path) == 4096 + 11 * 12 and rows_of(path) == 11
    # Another array after the first is no tail of an append.
    with open(path, "ab") as file:
        np.save(file, np.zeros(3))
    with cache.open_array(path, "r+") as array:
        with pytest.raises(ValueError, match="another array follows"):
            array.append([[3, 3, 3]])
    with cache.open_array(path, "r+", repair=True) as array:
        array.append([[3, 3, 3]])
    assert rows_of(path) == 12
    with pytest.raises(ValueError, match="repair"):
        cache.open_array(path, "r", repair=True)
    cache.close()


def test_interrupts_in_a_loop_of_appends(run: Callable[..., str], path: str) -> None:
    program = """
import os, random, signal, sys
import numpy as np, bifolio
cache = bifolio.Cache("4 MiB", flush_seconds=600)
array = cache.open_array(sys.argv[1], "w+", dtype="i4", shape=(0, 5000))
interrupts = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
for number in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.004))
        while True:
            array.append(np.full((7, 5000), len(array) // 7))
            if random.random() < 0.1:
                array.flush()
    except KeyboardInterrupt:
        interrupts += 1
    assert len(array) % 7 == 0
    assert (array[-7:] == len(array) // 7 - 1).all()
array.append(np.full((7, 5000), len(array) // 7))
print(interrupts, len(array))
"""
    interrupts, rows = map(int, run(program, path).split())
    assert interrupts == 60
    found = np.load(path)
    assert found.shape == (rows, 5000)
    expected = np.repeat(np.arange(rows // 7), 7)
    assert (found == expected[:, np.newaxis]).all()


def test_an_append_in_a_signal_handler(run: Callable[..., str], path: str) -> None:
    program = """
import signal, sys, bifolio
cache = bifolio.Cache("4 MiB", flush_seconds=600)
array = cache.open_array(sys.argv[1], "w+", dtype="i4", shape=(0,))
handled = 0
def handler(*_):
    global handled
    handled += 1
    array.append([1])
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
appended = 0
while handled < 100:
    array.append([2])
    appended += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(array) == handled + appended, (len(array), handled, appended)
print(len(array), int(array[:].sum()), handled)
"""
    rows, total, handled = map(int, run(program, path).split())
    found = np.load(path)
    assert len(found) == rows and found.sum() == total == 2 * rows - handled


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_wrapper_writes_once_what_was_interrupted(
    run: Callable[..., str], path: str, mode: str
) -> None:
    program = """
import io, random, signal, sys
import bifolio
signal.signal(signal.SIGALRM, signal.default_int_handler)
cache = bifolio.Cache("4 MiB", flush_seconds=600)
file = io.BufferedWriter(cache.open(sys.argv[1], sys.argv[2]), 1 << 20)
interrupts = 0
for number in range(300):
    file.write(b"%06d" % number * 20_000)
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0003))
            file.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except KeyboardInterrupt:
            interrupts += 1
assert file.raw.tell() == file.tell() == 300 * 120_000, (file.raw.tell(), file.tell())
print(interrupts)
"""
    assert int(run(program, path, mode)) > 20
    content = Path(path).read_bytes()
    assert len(content) == 300 * 120_000
    for number in range(300):
        assert content[number * 120_000 :][:120_000] == b"%06d" % number * 20_000


def test_an_interrupt_in_close(run: Callable[..., str], path: str) -> None:
    program = """
import random, signal, sys, time
import numpy as np, bifolio
signal.signal(signal.SIGALRM, signal.default_int_handler)
for number in range(100):
    cache = bifolio.Cache("2 MiB", flush_seconds=600)
    array = cache.open_array(sys.argv[1], "w+", dtype="i4", shape=(0, 5))
    file = cache.open(sys.argv[1] + ".file", "wb")
    array.append(np.full((50, 5), number))
    file.write(b"%03d" % number)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.003))
        if number % 3: file.close()
        if number % 2: array.close()
        cache.close()
        time.sleep(0.004)
    except KeyboardInterrupt:
        pass
    file.close()
    assert file.closed
    array.close()
    cache.close()
    assert cache.closed
    found = np.load(sys.argv[1])
    assert found.shape == (50, 5) and (found == number).all()
    assert open(sys.argv[1] + ".file").read() == "%03d" % number
print("all closed")
"""
    assert "all closed" in run(program, path)


# The end of the interpreter.

END = """
import csv, io, sys, zipfile
import bifolio, numpy as np
cache = bifolio.Cache("4 MiB", flush_seconds=600)
path = sys.argv[1]
{body}
"""

ENDS = {
    "buffered": 'b = io.BufferedWriter(cache.open(path, "wb")); b.write(b"some bytes")',
    "text": 't = io.TextIOWrapper(io.BufferedWriter(cache.open(path, "wb"))); t.write("some bytes")',
    "print": 't = io.TextIOWrapper(io.BufferedWriter(cache.open(path, "wb")))\n'
    'print("some bytes", end="", file=t)',
    "csv": 't = io.TextIOWrapper(io.BufferedWriter(cache.open(path, "wb")), newline="")\n'
    'w = csv.writer(t, lineterminator=""); w.writerow(["some bytes"])',
    "raw": 'f = cache.open(path, "wb"); f.write(b"some bytes")',
    "appended": 'b = io.BufferedWriter(cache.open(path, "ab")); b.write(b"some bytes")',
    "function": 'def main():\n    global b\n    b = io.BufferedWriter(cache.open(path, "wb"))\n'
    '    b.write(b"some bytes")\n    b.me = lambda: b\nmain()',
    "atexit": "import atexit\n"
    'f = cache.open(path, "wb")\natexit.register(f.write, b"some bytes")',
    # Never finalized, so never closed.
    "leaked": "import ctypes\n"
    'f = cache.open(path, "wb"); ctypes.pythonapi.Py_IncRef(ctypes.py_object(f))\n'
    'import atexit; atexit.register(f.write, b"some bytes")\n'
    "class A:\n    def __del__(self): f.pwrite(b'some', 0)\na = A()",
    "object": 'class A:\n    def __init__(self): self.f = cache.open(path, "wb")\n'
    '    def __del__(self): self.f.write(b"some bytes")\na = A()',
}


@pytest.mark.parametrize("kind", ENDS)
def test_the_end_loses_nothing_that_wrappers_buffer(
    run: Callable[..., str], path: str, kind: str
) -> None:
    assert run(END.format(body=ENDS[kind]), path) == ""
    assert Path(path).read_bytes() == b"some bytes"


def test_the_end_completes_archives(run: Callable[..., str], path: str) -> None:
    body = 'z = zipfile.ZipFile(cache.open(path, "w+b"), "w"); z.writestr("note", "x" * 1000)'
    assert run(END.format(body=body), path) == ""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and archive.read("note") == b"x" * 1000
    body = (
        'import h5py; h = h5py.File(cache.open(path + "5", "w+b"), "w")\n'
        'h["values"] = np.arange(10_000)'
    )
    assert run(END.format(body=body), path) == ""
    import h5py

    with h5py.File(path + "5") as store:
        np.testing.assert_array_equal(store["values"][:], np.arange(10_000))


def test_the_end_writes_rows_that_are_appended_late(run: Callable[..., str], path: str) -> None:
    body = """
array = cache.open_array(path, "w+", dtype="i4", shape=(0,))
array.append([1, 2])
class Late:
    def __del__(self):
        array.append([3]); array[0] = 9
late = Late()
import atexit; atexit.register(array.append, [7])
"""
    assert run(END.format(body=body), path) == ""
    assert np.load(path).tolist() == [9, 2, 7, 3]


def test_the_end_says_what_it_could_not_write(
    run: Callable[..., str], full_disk: Path, path: str
) -> None:
    body = f"""
bad = cache.memmap({str(full_disk / "bad")!r}, "u1", "w+", shape=(2 << 20,)); bad[:] = 7
good = [cache.memmap(path + str(n), "u1", "w+", shape=(10,)) for n in range(20)]
for each in good: each[:] = 3
"""
    printed = run(END.format(body=body), path)
    assert str(full_disk / "bad") in printed and "No space left" in printed
    for number in range(20):
        assert Path(f"{path}{number}").read_bytes() == b"\3" * 10


# Objects that are not made, names that are not what they were.


def test_a_failed_open_prints_nothing(run: Callable[..., str], path: str) -> None:
    program = """
import gc, sys, bifolio
cache = bifolio.Cache("1 MiB")
for path, mode in ((sys.argv[1], "rb"), (sys.argv[1], "r"), (sys.argv[1], "zb"), ("/", "rb")):
    try:
        cache.open(path, mode)
    except (OSError, ValueError):
        pass
    try:
        cache.open_array(path)
    except (OSError, ValueError):
        pass
gc.collect()
"""
    assert run(program, path) == ""


def test_one_cache_of_a_process_writes_a_file(cache: bifolio.Cache, path: str) -> None:
    array = cache.memmap(path, "i4", "w+", shape=(10,))
    other = bifolio.Cache("1 MiB")
    for opened in (
        lambda: other.memmap(path, "i4", "r+"),
        lambda: other.open(path, "ab"),
        lambda: other.open(path, "wb"),
    ):
        with pytest.raises(OSError, match="another cache") as caught:
            opened()
        assert caught.value.errno == errno.EBUSY and caught.value.filename == path
    assert os.path.getsize(path) == 40
    other.memmap(path, "i4", "r").close()
    array.close()
    other.memmap(path, "i4", "r+").close()
    other.close()


def test_settings_that_are_refused(recwarn: pytest.WarningsRecorder) -> None:
    for settings, text in (
        ({"memory": -1}, "memory: -1"),
        ({"memory": "64 MiB", "worker_memory": -5}, "worker_memory: -5"),
        ({"memory": "64 MiB", "worker_memory": 5}, "worker_memory: 5"),
        ({"memory": "64 MiB", "flush_seconds": 0}, "flush_seconds is 0"),
        ({"memory": "64 MiB", "flush_seconds": float("inf")}, "flush_seconds is inf"),
        ({"memory": "64 MiB", "flush_seconds": float("nan")}, "flush_seconds is nan"),
    ):
        with pytest.raises(ValueError, match=text):
            bifolio.Cache(**settings)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="more than this process may use"):
        bifolio.Cache("3 TiB").close()


def test_a_read_takes_its_result_only(run: Callable[..., str], path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(256 << 20)
    program = """
import resource, sys, bifolio
cache = bifolio.Cache("4 MiB")
file = cache.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = file.read()
assert len(data) == 256 << 20
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run(program, path)) < 320 << 10
