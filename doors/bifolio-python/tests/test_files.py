"""File objects, as other libraries use them, beside those of `open`."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import bifolio


class Twins(RuleBasedStateMachine):
    """A file of ours and one of `open`, which are treated alike and answer alike."""

    directory: Path
    cache: bifolio.Cache

    def __init__(self) -> None:
        super().__init__()
        self.paths = [str(self.directory / f"{os.urandom(6).hex()}") for _ in range(2)]
        for path in self.paths:
            with open(path, "wb") as file:
                file.write(bytes(range(1, 200)) * 50)
        self.mine: Any = self.cache.open(self.paths[0], "r+b")
        self.theirs: Any = open(self.paths[1], "r+b", buffering=0)

    def both(self, call: Any) -> None:
        results = []
        for file in (self.mine, self.theirs):
            try:
                results.append(call(file))
            except Exception as error:  # noqa: BLE001 - any kind is compared
                results.append((type(error), getattr(error, "errno", None)))
        assert results[0] == results[1]
        assert self.mine.tell() == self.theirs.tell()

    @rule(offset=st.integers(-200, 12_000), whence=st.integers(0, 2))
    def seek(self, offset: int, whence: int) -> None:
        self.both(lambda file: file.seek(offset, whence))

    @rule(size=st.one_of(st.none(), st.integers(-1, 5000)))
    def read(self, size: int | None) -> None:
        self.both(lambda file: file.read(size))

    @rule(size=st.one_of(st.none(), st.integers(-1, 300)))
    def readline(self, size: int | None) -> None:
        self.both(lambda file: file.readline(size))

    @rule(count=st.integers(0, 30))
    def lines(self, count: int) -> None:
        self.both(lambda file: list(itertools.islice(file, count)))

    @rule(size=st.integers(0, 5000))
    def readinto(self, size: int) -> None:
        def call(file: Any) -> Any:
            buffer = bytearray(size)
            return file.readinto(buffer), buffer

        self.both(call)

    @rule(data=st.one_of(st.binary(max_size=50), st.just(b"\n" * 5000)))
    def write(self, data: bytes) -> None:
        self.both(lambda file: file.write(data))

    @rule(size=st.one_of(st.none(), st.integers(-1, 15_000)))
    def truncate(self, size: int | None) -> None:
        self.both(lambda file: file.truncate(size))

    @rule()
    def flush(self) -> None:
        self.mine.flush()
        with open(self.paths[0], "rb") as mine, open(self.paths[1], "rb") as theirs:
            assert mine.read() == theirs.read()

    @rule(kind=st.sampled_from(["r", "a"]))
    def reopen(self, kind: str) -> None:
        self.mine.close()
        self.theirs.close()
        self.mine = self.cache.open(self.paths[0], kind + "+b")
        self.theirs = open(self.paths[1], kind + "+b", buffering=0)
        self.both(lambda file: file.tell())

    def teardown(self) -> None:
        self.mine.close()
        self.theirs.close()
        with open(self.paths[0], "rb") as mine, open(self.paths[1], "rb") as theirs:
            assert mine.read() == theirs.read()
        for path in self.paths:
            os.unlink(path)


def test_a_file_is_like_that_of_open(cache: bifolio.Cache, tmp_path: Path) -> None:
    Twins.directory, Twins.cache = tmp_path, cache
    steps = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Twins, settings=steps)


def test_an_append_of_no_bytes_leaves_the_position(cache: bifolio.Cache, tmp_path: Path) -> None:
    found = []
    for name in ("mine", "theirs"):
        path = tmp_path / name
        path.write_bytes(b"hello")
        file: Any = cache.open(path, "ab") if name == "mine" else open(path, "ab", buffering=0)
        with file:
            file.truncate(0)
            found.append([file.tell(), file.write(b""), file.tell(), file.write(b"x"), file.tell()])
    assert found[0] == found[1] == [5, 0, 5, 1, 1]


@pytest.mark.parametrize("mode", ["rb", "r+b", "rb+", "wb", "w+b", "xb", "x+b", "ab", "a+b"])
@pytest.mark.parametrize("exists", [True, False])
def test_modes(cache: bifolio.Cache, tmp_path: Path, mode: str, exists: bool) -> None:
    results: list[Any] = []
    for name in ("mine", "theirs"):
        path = tmp_path / name
        if exists:
            path.write_bytes(b"hello")
        try:
            is_mine = name == "mine"
            file: Any = cache.open(path, mode) if is_mine else open(path, mode, buffering=0)
        except OSError as error:
            results.append((type(error), error.errno, error.filename.endswith(name)))
            continue
        with file:
            answers: list[Any] = [file.readable(), file.writable(), file.seekable(), file.tell()]
            for call in (lambda: file.read(), lambda: file.write(b"xy"), lambda: file.truncate(3)):
                try:
                    answers.append(call())
                except io.UnsupportedOperation:
                    answers.append("unsupported")
        results.append((answers, path.read_bytes()))
        with pytest.raises(ValueError, match="closed"):
            file.read()
    assert results[0] == results[1]


def test_what_is_refused(cache: bifolio.Cache, path: str) -> None:
    for mode in ("r", "w", "rt", "rwb", "zb", "b", ""):
        with pytest.raises(ValueError):
            cache.open(path, mode)
    with cache.open(path, "wb") as file:
        with pytest.raises(io.UnsupportedOperation, match="no descriptor"):
            file.fileno()
        assert not file.isatty()
        assert repr(file) == f"<bifolio.File {path!r} mode 'wb'>"
    with pytest.raises(IsADirectoryError):
        cache.open(os.path.dirname(path))


def table() -> pa.Table:
    numbers = np.random.default_rng(1).integers(0, 1000, 100_000)
    return pa.table({"number": numbers, "text": [f"row {number}" for number in numbers]})


def test_pyarrow_reads_and_writes_parquet(cache: bifolio.Cache, path: str) -> None:
    expected = table()
    with cache.open(path, "wb") as file:
        pq.write_table(expected, file, row_group_size=10_000)
    assert pq.read_table(path).equals(expected)
    with cache.open(path) as file:
        assert pq.read_table(file).equals(expected)
    with cache.open(path) as file:
        part = pq.ParquetFile(file).read_row_groups([3, 7], columns=["text"])
    assert part.column("text").to_pylist()[0] == expected.column("text")[30_000].as_py()


def test_pyarrow_reads_and_writes_feather(cache: bifolio.Cache, path: str) -> None:
    with cache.open(path, "wb") as file:
        pyarrow.feather.write_feather(table(), file)
    with cache.open(path) as file:
        assert pyarrow.feather.read_table(file).equals(table())


def test_h5py_reads_and_writes(cache: bifolio.Cache, path: str) -> None:
    values = np.random.default_rng(2).random((3000, 100))
    with cache.open(path, "w+b") as file:
        with h5py.File(file, "w") as store:
            store.create_dataset("plain", data=values)
            store.create_dataset("packed", data=values, chunks=(100, 100), compression="gzip")
    with h5py.File(path) as store:
        np.testing.assert_array_equal(store["plain"][:], values)
    with cache.open(path, "r+b") as file, h5py.File(file, "r+") as store:
        for name in ("plain", "packed"):
            np.testing.assert_array_equal(store[name][::7, 3:50], values[::7, 3:50])
        store["plain"][5] = 0
    with h5py.File(path) as store:
        assert not store["plain"][5].any()


def test_zipfile_and_numpy(cache: bifolio.Cache, path: str) -> None:
    values = np.arange(100_000)
    with cache.open(path, "w+b") as file:
        np.savez_compressed(file, a=values, b=values[::2])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with cache.open(path) as file, zipfile.ZipFile(file) as archive:
        assert archive.namelist() == ["a.npy", "b.npy"]
    with cache.open(path) as file, np.load(file) as found:
        np.testing.assert_array_equal(found["b"], values[::2])
    with cache.open(path, "r+b") as file, zipfile.ZipFile(file, "a") as archive:
        archive.writestr("note", "more")
    with zipfile.ZipFile(path) as archive:
        assert archive.read("note") == b"more"
    with cache.open(path + ".npy", "wb") as file:
        np.save(file, values)
    with cache.open(path + ".npy") as file:
        np.testing.assert_array_equal(np.load(file), values)


def test_pickle_and_text(cache: bifolio.Cache, path: str) -> None:
    things = [{"number": number, "bytes": bytes(number)} for number in range(300)]
    with cache.open(path, "wb") as file:
        for thing in things:
            pickle.dump(thing, file)
    with cache.open(path) as file:
        assert [pickle.load(file) for _ in things] == things
    with io.TextIOWrapper(io.BufferedWriter(cache.open(path, "wb")), "utf-8") as text:
        text.writelines(f"línea {number}\n" for number in range(1000))
    with io.TextIOWrapper(io.BufferedReader(cache.open(path)), "utf-8") as text:
        assert list(text)[999] == "línea 999\n"
    with cache.open(path) as file:
        assert len(list(file)) == 1000


def test_lines(cache: bifolio.Cache, path: str) -> None:
    """The lines of a loop, and the position after each, are those of a file of Python."""
    random = np.random.default_rng(5)
    lengths = [*random.integers(0, 300, 2000).tolist(), 70_000, 1, 200_000, 0, 5]
    text = b"\n".join(b"x" * length for length in lengths)
    for ending in (b"", b"\n", b"\n\n"):
        with open(path, "wb") as target:
            target.write(text + ending)
        with cache.open(path) as mine, open(path, "rb") as theirs:
            for line, expected in zip(mine, theirs, strict=True):
                assert line == expected and mine.tell() == theirs.tell()
            assert list(mine) == [] and next(iter(mine), None) is None
            for file in (mine, theirs):
                file.seek(1000)
                lines = iter(file)
                next(lines)
                file.seek(50_000)
                next(lines)
            assert mine.tell() == theirs.tell() and mine.read(10) == theirs.read(10)
            assert mine.readlines() == theirs.readlines()
    with cache.open(path, "w+b") as file:
        file.write(b"one\ntwo\n")
        file.seek(0)
        lines = iter(file)
        assert [*lines] == [b"one\n", b"two\n"]
        file.write(b"three\nfour")
        file.seek(8)
        assert [*lines] == [b"three\n", b"four"]
    with pytest.raises(ValueError, match="closed"):
        next(lines)
    with cache.open(path, "wb") as file, pytest.raises(io.UnsupportedOperation):
        next(iter(file))


def test_flush_shows_writes_to_other_programs(cache: bifolio.Cache, path: str) -> None:
    file = cache.open(path, "wb")
    file.write(b"seen")
    file.flush()
    assert Path(path).read_bytes() == b"seen"
    file.write(b" by all")
    file.sync()
    assert Path(path).read_bytes() == b"seen by all"
    del file
    with cache.open(path) as again:
        copy = pickle.loads(pickle.dumps(again))
        assert copy.read() == again.read() == b"seen by all"
        assert copy.cache is cache
        copy.close()


def test_the_next_cache_reads_the_pages_of_the_last(tmp_path: Path) -> None:
    path, hot = tmp_path / "data", tmp_path / "hot"
    values = np.arange(100_000, dtype="f8")
    np.save(path, values)
    array = f"{path}.npy"
    with bifolio.Cache("4 MiB") as cache:
        opened = cache.open_array(array)
        assert opened[50_000] == 50_000
        saved = cache.save_hot(hot)
        assert saved >= 4096
        with pytest.raises(ValueError, match="not replaced"):
            cache.save_hot(array)
    with bifolio.Cache("4 MiB") as cache:
        cache.restore_hot(hot)
        opened = cache.open_array(array)
        # The pages that the open has read itself are there already.
        assert cache.restore_hot(str(hot), wait=True) <= saved
        misses = cache.stats()["reads_misses"]
        assert opened[50_000] == 50_000
        assert cache.stats()["reads_misses"] == misses
        with pytest.raises(FileNotFoundError):
            cache.restore_hot(tmp_path / "absent")
        with pytest.raises(ValueError, match="no list"):
            cache.restore_hot(array)
