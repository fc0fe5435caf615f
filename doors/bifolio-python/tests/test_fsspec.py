"""The file system for fsspec, as other libraries use it."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet
import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

import bifolio
from bifolio.fsspec import FileSystem, default_cache
from bifolio.zarr import Store


def test_urls(tmp_path: Path) -> None:
    url = f"bifolio://{tmp_path}/text"
    with fsspec.open(url, "wt") as file:
        file.write("one\ntwo\n")
    assert (tmp_path / "text").read_text() == "one\ntwo\n"
    with fsspec.open(url) as file:
        assert isinstance(file, bifolio.File) and file.cache is default_cache()
        assert list(file) == [b"one\n", b"two\n"]
    with fsspec.open(url, "rt") as file:
        assert file.readlines() == ["one\n", "two\n"]
    with fsspec.open(url + ".gz", "wb", compression="gzip") as file:
        file.write(b"packed")
    with fsspec.open(url + ".gz", "rb", compression="gzip") as file:
        assert file.read() == b"packed"
    files, path = fsspec.core.url_to_fs(url)
    assert path == f"{tmp_path}/text" and files.unstrip_protocol(path) == url
    assert files.cat_file(path, 4, 7) == b"two"
    assert sorted(files.ls(str(tmp_path), detail=False)) == [path, path + ".gz"]


def test_what_was_read_stays_in_memory(cache: bifolio.Cache, tmp_path: Path) -> None:
    files = FileSystem(cache, auto_mkdir=True)
    path = f"{tmp_path}/new/directory/file"
    with files.open(path, "wb") as file:
        file.write(bytes(100_000))
    time.sleep(0.05)  # A file that has just changed may change again without a trace.
    for _ in range(3):
        with files.open(path) as file:
            assert len(file.read()) == 100_000
    assert cache.stats()["storage_read_bytes"] <= 110_000
    other = f"{tmp_path}/other"
    Path(other).write_bytes(b"replaced")
    os.replace(other, path)
    assert files.cat_file(path) == b"replaced"
    for number in range(200):
        Path(f"{other}{number}").write_bytes(b"x")
        files.cat_file(f"{other}{number}")
    assert len(os.listdir("/proc/self/fd")) < 250


@pytest.mark.parametrize("pause", [0, 0.05])
def test_changes_of_other_programs_are_seen_once_readers_have_closed_a_file(
    cache: bifolio.Cache, tmp_path: Path, pause: float
) -> None:
    files = FileSystem(cache)
    path = tmp_path / "file"
    for number in range(5):
        # In place, of equal length, by a program that knows nothing of the cache.
        with open(path, "r+b" if number else "wb") as file:
            file.write(f"contents {number}".encode() * 1000)
        time.sleep(pause)
        for _ in range(2):
            assert files.cat_file(str(path))[:10] == f"contents {number}".encode()
    with open(path, "ab") as file:
        file.write(b"appended")
    assert files.cat_file(str(path)).endswith(b"appended")
    path.write_bytes(b"short")
    assert files.cat_file(str(path)) == b"short"


def open_below(directory: Path) -> list[str]:
    """The files below a directory that this process has open; a name that is gone ends so."""
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [link for link in links if link.startswith(f"{directory}/")]


def test_a_removed_file_takes_no_room(cache: bifolio.Cache, tmp_path: Path) -> None:
    files = FileSystem(cache)

    def move(path: str) -> None:
        Path(f"{tmp_path}/other").write_bytes(b"other")
        assert files.cat_file(f"{tmp_path}/other") == b"other"
        # Over a file, and from a name.
        files.mv(f"{tmp_path}/other", path)

    for remove in files.rm, files.rm_file, move:
        path = f"{tmp_path}/removed"
        Path(path).write_bytes(bytes(50_000))
        assert len(files.cat_file(path)) == 50_000 and open_below(tmp_path)
        remove(path)
        assert not open_below(tmp_path)


def test_a_kept_file_that_cannot_be_closed_fails_no_other(
    cache: bifolio.Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad:
        closed = False

        def close(self) -> None:
            raise OSError("no space")

    files = FileSystem(cache, kept_files=2)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
    files.cat_file(f"{tmp_path}/a")
    kept = files._kept[f"{tmp_path}/a"]
    files._kept[f"{tmp_path}/a"] = kept._replace(file=Bad())  # type: ignore[arg-type]
    assert files.cat_file(f"{tmp_path}/b") == b"b" and files.cat_file(f"{tmp_path}/c") == b"c"
    assert "no space" in caplog.text
    kept.file.close()


def test_pickles_keep_the_cache(cache: bifolio.Cache, tmp_path: Path) -> None:
    files = FileSystem(cache)
    again: Any = pickle.loads(pickle.dumps(files))
    (tmp_path / "file").write_bytes(b"bytes")
    with again.open(tmp_path / "file") as file:
        assert file.cache is cache and file.read() == b"bytes"


def test_datasets_of_pyarrow(cache: bifolio.Cache, tmp_path: Path) -> None:
    files = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(FileSystem(cache)))
    table = pa.table({"number": np.arange(20_000), "text": [f"{n}" for n in range(20_000)]})
    for part in range(3):
        pa.parquet.write_table(table, f"{tmp_path}/{part}.parquet", filesystem=files)
    dataset = pa.dataset.dataset(str(tmp_path), filesystem=files, format="parquet")
    found = dataset.to_table(columns=["number"])
    assert len(found) == 60_000 and found["number"].to_numpy().sum() == 3 * np.arange(20_000).sum()
    assert cache.stats()["storage_read_bytes"] > 0


def test_zarr(cache: bifolio.Cache, tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 9, (300, 50))
    zarr.create_array(str(tmp_path / "z"), data=values, chunks=(30, 50))
    time.sleep(0.05)  # As above.
    wrapper = pytest.importorskip("fsspec.implementations.asyn_wrapper")
    files = wrapper.AsyncFileSystemWrapper(FileSystem(cache), asynchronous=True)
    store = zarr.storage.FsspecStore(files, path=str(tmp_path / "z"), read_only=True)
    array = zarr.open_array(store, mode="r")
    assert (array[:] == values).all()
    assert (array.oindex[[5, 299, 30]] == values[[5, 299, 30]]).all()
    before = cache.stats()["storage_read_bytes"]
    assert (array[:] == values).all()
    assert cache.stats()["storage_read_bytes"] == before > 0


def test_zarr_store(cache: bifolio.Cache, tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 9, (300, 50))
    store = Store(tmp_path / "z", cache=cache)
    array = zarr.create_array(store, shape=values.shape, dtype=values.dtype, shards=(60, 50), chunks=(10, 50))
    array[:] = values
    time.sleep(0.05)
    array = zarr.open_array(Store(tmp_path / "z", cache=cache, read_only=True), mode="r")
    assert (array[:] == values).all()
    assert (array.oindex[[5, 299, 30]] == values[[5, 299, 30]]).all()
    before = cache.stats()["storage_read_bytes"]
    assert (array[:] == values).all() and (array[100:130] == values[100:130]).all()
    assert cache.stats()["storage_read_bytes"] == before > 0
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    # Another program writes a chunk: it is read anew.
    zarr.open_array(str(tmp_path / "z"), mode="r+")[299] = 7
    assert (array[299] == 7).all() and (array[0] == values[0]).all()
    assert store.with_read_only(True).read_only and store == Store(tmp_path / "z", cache=cache)
    again: Any = pickle.loads(pickle.dumps(store))
    assert (zarr.open_array(again, mode="r")[0] == values[0]).all()


def test_replaced_and_deleted_chunks_take_no_room(cache: bifolio.Cache, tmp_path: Path) -> None:
    store = Store(tmp_path / "z", cache=cache)
    group = zarr.create_group(store)
    arrays = [
        group.create_array(name, shape=(300, 50), chunks=(30, 50), dtype="i8") for name in "abc"
    ]
    values = np.random.default_rng(3).integers(1, 9, (300, 50))
    for array in arrays:
        array[:] = values
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    where = tmp_path / "z"

    def deleted() -> list[str]:
        return [name for name in open_below(where) if name.endswith("(deleted)")]

    def read_all() -> None:
        for name in ("a/c/0/0", "a/c/1/0", "a/c/2/0", "b/c/0/0", "b/c/1/0", "c/c/0/0"):
            store.get_sync(name)
        assert open_below(where)

    changes: list[Any] = [
        lambda: arrays[0].__setitem__(slice(0, 60), 5),
        # A chunk of zeros is not stored.
        lambda: arrays[0].__setitem__(slice(0, 30), 0),
        lambda: asyncio.run(store.set("a/c/1/0", buffer.from_bytes(b"x"))),
        lambda: asyncio.run(store.set_if_not_exists("a/c/1/0", buffer.from_bytes(b"x"))),
        lambda: asyncio.run(store.delete("a/c/1/0")),
        lambda: asyncio.run(store.delete_dir("b")),
        lambda: asyncio.run(store.delete("a")),
        lambda: asyncio.run(store.clear()),
    ]
    if hasattr(zarr.storage.LocalStore, "set_sync"):
        changes[4:4] = [
            lambda: store.set_sync("a/c/1/0", buffer.from_bytes(b"y")),
            lambda: store.delete_sync("a/c/2/0"),
        ]
    for number, change in enumerate(changes):
        read_all()
        change()
        assert not deleted(), number
        if not (where / "c/c/0/0").exists():
            break
    assert not open_below(where)
    zarr.create_array(store, data=values, chunks=(30, 50), name="d")
    store.get_sync("d/c/0/0")
    assert open_below(where)
    store.close()
    assert not open_below(where)


def test_zarr_store_matches_that_of_zarr(cache: bifolio.Cache, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(200)))
    (tmp_path / "directory").mkdir()
    stores = [Store(tmp_path, cache=cache), zarr.storage.LocalStore(tmp_path)]
    prototype = zarr.core.buffer.default_buffer_prototype()
    requests = [
        None,
        RangeByteRequest(3, 50),
        RangeByteRequest(190, 250),
        RangeByteRequest(5, 5),
        OffsetByteRequest(150),
        OffsetByteRequest(250),
        SuffixByteRequest(7),
        SuffixByteRequest(999),
    ]

    async def answers(store: Any) -> list[bytes | None]:
        found = [await store.get(key, prototype) for key in ("none", "directory", "key/x")]
        found += await store.get_partial_values(prototype, [("key", it) for it in requests])
        return [each and each.to_bytes() for each in found]

    ours, theirs = [asyncio.run(answers(store)) for store in stores]
    assert ours == theirs and ours[3] == bytes(range(200))


def test_pandas_reads_urls(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"{n}" for n in range(1000)]})
    for name, read in (("t.csv", pandas.read_csv), ("t.parquet", pandas.read_parquet)):
        url = f"bifolio://{tmp_path}/{name}"
        (frame.to_csv if name.endswith("csv") else frame.to_parquet)(url, index=False)
        found = read(url, dtype={"b": str}) if name.endswith("csv") else read(url)
        assert found.equals(frame)


def test_dask_reads_parts(cache: bifolio.Cache, tmp_path: Path) -> None:
    dask_array = pytest.importorskip("dask.array")
    values = np.arange(90_000).reshape(300, 300)
    zarr.create_array(str(tmp_path / "z"), data=values, chunks=(50, 100))
    array = dask_array.from_zarr(zarr.open_array(Store(tmp_path / "z", cache=cache), mode="r"))
    assert int(array.sum().compute(scheduler="threads")) == values.sum()
    assert (array[::7, 5:90].compute() == values[::7, 5:90]).all()


def test_xarray_opens_a_store(cache: bifolio.Cache, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"t": (("time", "x"), np.arange(600.0).reshape(60, 10))})
    data.to_zarr(Store(tmp_path / "z", cache=cache), consolidated=False)
    opened = xarray.open_zarr(Store(tmp_path / "z", cache=cache), consolidated=False, chunks=None)
    assert opened["t"].sel(time=slice(10, 20)).equals(data["t"].sel(time=slice(10, 20)))
    assert float(opened["t"].mean()) == float(data["t"].mean())
    assert cache.stats()["storage_read_bytes"] > 0
