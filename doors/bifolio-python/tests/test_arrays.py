"""Arrays beside `numpy.memmap`: the same index gives the same array, or the same kind of error."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import warnings
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bifolio

# Machines differ in speed: slow data is no failure.
CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "bifolio", deadline=None, max_examples=400, suppress_health_check=CHECKS
)
settings.load_profile("bifolio")

#: One cache for all examples: smaller than some arrays.
CACHE = bifolio.Cache("1 MiB")
DIRECTORY = tempfile.TemporaryDirectory()
NUMBERS = itertools.count()

IS_NUMPY_1 = np.lib.NumpyVersion(np.__version__) < "2.0.0"

DTYPES = [
    np.dtype("u1"),
    np.dtype("?"),
    np.dtype("i2"),
    np.dtype(">i4"),
    np.dtype("f4"),
    np.dtype(">f8"),
    np.dtype("c16"),
    np.dtype("M8[s]"),
    np.dtype("S3"),
    np.dtype("U2"),
    np.dtype([("x", "i2"), ("y", ">f8", (2,)), ("z", "u1")]),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "u1"], "offsets": [2, 9], "itemsize": 12}),
]


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 1) -> np.ndarray[Any, Any]:
    """An array whose elements all differ, as far as the dtype allows."""
    numbers = np.random.default_rng(seed).integers(32, 120, (*shape, dtype.itemsize), np.uint8)
    if dtype.kind == "b":
        numbers &= 1
    if dtype.kind == "U":
        numbers = np.random.default_rng(seed).integers(65, 90, (*shape, dtype.itemsize // 4), "u4")
    return numbers.view(dtype).reshape(shape) if numbers.size else np.zeros(shape, dtype)


SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index that is valid more often than not."""

    def one(length: int) -> st.SearchStrategy[Any]:
        number = st.integers(-length, max(length - 1, 0))
        arrays = hnp.arrays(
            st.sampled_from([np.int64, np.int8, np.intp]),
            hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5),
            elements=number,
        )
        return st.one_of(
            number,
            st.slices(max(length, 1)),
            st.builds(slice, number, number, st.sampled_from([-3, -2, -1, 1, 2, 3, None])),
            arrays,
            arrays.map(lambda array: array.tolist()),
            hnp.arrays(np.bool_, (length,)),
            number.map(np.int32),
            number.map(np.asarray),
        )

    items: list[Any] = []
    axis = 0
    while axis < len(shape) and draw(st.integers(0, 5)):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            items.append(None)
        elif kind == 1 and axis + 1 < len(shape):
            items.append(draw(hnp.arrays(np.bool_, shape[axis : axis + 2])))
            axis += 2
        elif kind == 2 and Ellipsis not in [item for item in items if not hasattr(item, "dtype")]:
            items.append(Ellipsis)
            axis += draw(st.integers(0, len(shape) - axis))
        elif kind == 3 and not draw(st.integers(0, 3)):
            items.append(draw(st.sampled_from([True, False, 99, 1.5, "x", np.bool_(True), -50])))
            axis += 1
        else:
            items.append(draw(one(shape[axis])))
            axis += 1
    if len(items) == 1 and draw(st.booleans()):
        return items[0]
    return tuple(items)


def outcome(call: Any) -> Any:
    try:
        return call()
    except DeprecationWarning as warning:
        # numpy 1 warned of what numpy 2 refuses.
        assert IS_NUMPY_1
        return IndexError if "index" in str(warning) else OverflowError
    except Exception as error:  # noqa: BLE001 - any kind is compared
        return type(error)


def same(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, type):
        assert mine is theirs, (mine, theirs)
        return
    assert not isinstance(mine, type), mine
    assert type(mine) is (np.ndarray if isinstance(theirs, np.ndarray) else type(theirs))
    assert np.shape(mine) == np.shape(theirs)
    if isinstance(theirs, np.ndarray):
        assert mine.dtype == theirs.dtype
    np.testing.assert_array_equal(mine, theirs)


def pair(
    shape: tuple[int, ...], dtype: np.dtype[Any], order: str, offset: int
) -> tuple[bifolio.Array, Any]:
    """The same bytes as an array of ours and as a `numpy.memmap`, in two files."""
    values = filled(shape, dtype)
    # New files: one that a failed example left open in the cache keeps its pages.
    paths = [os.path.join(DIRECTORY.name, f"{next(NUMBERS)}") for _ in range(2)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"\7" * offset + values.tobytes("F" if order == "F" else "C"))
            if not values.size:
                file.write(b"\7")
    ours = CACHE.memmap(paths[0], dtype, "r+", offset, shape, order)
    return ours, np.memmap(paths[1], dtype, "r+", offset, shape, order)


def has_mask(key: Any) -> bool:
    items = key if isinstance(key, tuple) else (key,)
    return any(isinstance(item, bool) or getattr(item, "dtype", None) == bool for item in items)


def read(ours: bifolio.Array, key: Any) -> Any:
    """What an index returns, in memory: a field is an array on the file."""
    found = ours[key]
    return found[...] if isinstance(found, bifolio.Array) else found


def remove(ours: bifolio.Array, theirs: Any) -> None:
    ours.close()
    os.unlink(ours.filename)
    os.unlink(theirs.filename)


@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.sampled_from("CF"), st.sampled_from([0, 13]))
def test_an_index_reads_what_numpy_reads(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, offset: int
) -> None:
    ours, theirs = pair(shape, dtype, order, offset)
    assert (ours.shape, ours.dtype, ours.strides) == (theirs.shape, theirs.dtype, theirs.strides)
    assert (ours.size, ours.nbytes, ours.ndim) == (theirs.size, theirs.nbytes, theirs.ndim)
    for _ in range(4):
        key = data.draw(indices(shape))
        hypothesis.note(repr(key))
        same(outcome(lambda: read(ours, key)), outcome(lambda: np.array(theirs)[key]))
        same(outcome(lambda: read(ours.T, key)), outcome(lambda: np.array(theirs).T[key]))
    remove(ours, theirs)


@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.sampled_from("CF"), st.sampled_from([0, 13]))
def test_an_assignment_writes_what_numpy_writes(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, offset: int
) -> None:
    ours, theirs = pair(shape, dtype, order, offset)
    for seed in range(3):
        key = data.draw(indices(shape))
        hypothesis.note(repr(key))
        found = outcome(lambda: np.array(theirs)[key])
        wanted = np.shape(found) if not isinstance(found, type) else ()
        if data.draw(st.booleans()):
            wanted = wanted[1:]
        elif np.size(found) and wanted and data.draw(st.integers(0, 5)) == 0 and not has_mask(key):
            # (With too many axes, numpy raises another error for masks and single elements.)
            wanted = (1, 3, *wanted)
        value = filled(wanted, dtype, seed)
        hypothesis.note(repr(value))

        def assign(target: Any) -> None:
            target[key] = value

        same(outcome(lambda: assign(ours)), outcome(lambda: assign(theirs)))
    same(ours[...], np.array(theirs))
    ours.close()
    with open(ours.filename, "rb") as mine, open(str(theirs.filename), "rb") as file:
        theirs.flush()
        if dtype.fields is None or dtype.itemsize == 19:
            assert mine.read()[: offset + theirs.nbytes] == file.read()[: offset + theirs.nbytes]
    remove(ours, theirs)


def test_errors_of_indices_have_the_texts_of_numpy() -> None:
    ours, theirs = pair((3, 4), np.dtype("f4"), "C", 0)
    for key in (
        *(5, -4, (0, 0, 0), 1.5, "x", [1.5], (..., ...), slice(0, 1, 0), slice("a"), [5], {1}),
        *(np.zeros(4, bool), ([0, 1], [0, 1, 2]), np.array(1.0), (slice(None), [9]), b"x", [[3]]),
    ):
        with pytest.raises((IndexError, ValueError, TypeError)) as expected:
            theirs[key]
        with pytest.raises(expected.type) as found:
            ours[key]
        if not IS_NUMPY_1:
            assert str(found.value).strip() == str(expected.value).strip()
    remove(ours, theirs)


@given(
    st.data(),
    hnp.array_shapes(max_dims=3, min_side=1, max_side=6),
    st.sampled_from("CF"),
    st.sampled_from(["raise", "wrap", "clip"]),
    st.booleans(),
)
def test_take_is_that_of_numpy(
    data: st.DataObject, shape: tuple[int, ...], order: str, mode: Any, with_out: bool
) -> None:
    ours, theirs = pair(shape, np.dtype("i4"), order, 0)
    axis = data.draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    where = data.draw(
        hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, max_dims=2), elements=st.integers(-8, 7))
    )
    expected = outcome(lambda: np.array(theirs).take(where, axis, mode=mode))
    out = None
    if with_out and not isinstance(expected, type):
        out = np.full(np.shape(expected), 77, np.int32)
    found = outcome(lambda: ours.take(where, axis, out, mode))
    if out is not None:
        assert found is out
        same(out, np.asarray(expected))
    else:
        same(found, expected)
    remove(ours, theirs)


def gathered(array: Any, starts: Any, lengths: Any) -> Any:
    """What `gather` returns, in numpy."""
    parts = []
    each = np.broadcast_to(lengths, np.shape(starts))
    for start, length in zip(np.ravel(starts), np.ravel(each), strict=True):
        first = start + len(array) if start < 0 else start
        if not 0 <= first <= first + length <= len(array):
            raise IndexError
        parts += range(first, first + length)
    rows = array[np.array(parts, np.int64)]
    if np.ndim(lengths):
        return rows, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return rows.reshape(*np.shape(starts), lengths, *array.shape[1:])


@given(
    st.data(),
    hnp.array_shapes(max_dims=3, min_side=1, max_side=9),
    st.sampled_from(DTYPES),
    st.sampled_from("CF"),
    st.sampled_from([0, 13]),
)
def test_gather_returns_consecutive_rows(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, offset: int
) -> None:
    ours, theirs = pair(shape, dtype, order, offset)
    values, count = np.array(theirs), shape[0]
    starts = st.integers(-count - 1, count) if data.draw(st.booleans()) else st.integers(0, 1)
    many = hnp.array_shapes(min_dims=1, max_dims=2, max_side=5)
    where = data.draw(hnp.arrays(data.draw(st.sampled_from([np.int64, np.int8])), many, elements=starts))
    length = data.draw(st.integers(0, min(count, 3)))
    for array, wanted in ((ours, values), (ours.T, values.T)):
        expected = outcome(lambda: gathered(wanted, where, length))
        same(outcome(lambda: array.gather(where, length)), expected)
        if not isinstance(expected, type):
            out = np.zeros_like(expected, order="C")
            found = array.gather(where.tolist(), np.int32(length), out=out)
            assert found is out
            same(out, expected)
    where = where.reshape(-1)
    lengths = data.draw(hnp.arrays(np.int64, where.shape, elements=st.integers(0, 3)))
    for array, wanted in ((ours, values), (ours.T, values.T)):
        expected = outcome(lambda: gathered(wanted, where, lengths))
        found = outcome(lambda: array.gather(where, lengths))
        if isinstance(expected, type):
            assert found is expected
            continue
        same(found[0], expected[0])
        same(found[1], expected[1])
        out = np.zeros_like(expected[0], order="C")
        assert array.gather(where, lengths.tolist(), out=out)[0] is out
        same(out, expected[0])
    remove(ours, theirs)


def test_gather_and_prefetch_refuse_what_is_not_there(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="i4", shape=(10, 3))
    array[...] = np.arange(30).reshape(10, 3)
    for starts, lengths in (([8], 3), ([-11], 1), ([0, 9], [1, 2]), ([2**62], 2**62)):
        with pytest.raises(IndexError, match="out of bounds for axis 0 with size 10"):
            array.gather(starts, lengths)
    for starts, lengths, text in (
        *(([0], -1, "negative"), ([0], [-1], "negative"), ([0, 1], [1], "shape")),
        ([[0, 1]], [[1, 1]], "one axis"),
    ):
        with pytest.raises(ValueError, match=text):
            array.gather(starts, lengths)
    for out in (np.zeros((1, 3, 3), "i8"), np.zeros((1, 2, 3), "i4"), np.zeros((1, 3, 6), "i4")[..., ::2]):
        with pytest.raises(ValueError, match="out must be"):
            array.gather([0], 3, out=out)
    with pytest.raises(IndexError, match="index 10 is out of bounds"):
        array.prefetch([0, 10])
    with pytest.raises(TypeError, match="no end"):
        array.prefetch([0, 1], 2)
    with pytest.raises(TypeError):
        array.gather([0.5], 1)
    same(array.gather(np.array([10], "u8"), 0), np.zeros((1, 0, 3), "i4"))
    with pytest.raises(IndexError):
        array.gather(np.array([2**64 - 1], "u8"), 0)
    with pytest.raises(TypeError, match="unsized"):
        cache.open_array(path + "0", "w+", dtype="i4", shape=()).gather([0], 1)


def test_prefetch_reads_the_rows_of_indices(path: str) -> None:
    rows = np.arange(4096 * 512, dtype="i8").reshape(4096, 512)
    np.save(path, rows)
    cache = bifolio.Cache("64 MiB")
    array = cache.open_array(path + ".npy")
    batch = np.random.default_rng(3).permutation(4096)[:300].reshape(20, 15)
    array.prefetch(batch)
    deadline = time.monotonic() + 60
    before = cache.stats()["reads_misses"]
    # Those that are still on their way count as misses.
    while cache.stats()["storage_read_bytes"] < 300 * 4096 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    same(array.take(batch), rows[batch])
    assert cache.stats()["reads_misses"] - before < 30
    cache.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_files_of_every_kind(
    cache: bifolio.Cache, path: str, dtype: np.dtype[Any], order: str, version: tuple[int, int]
) -> None:
    values = np.asarray(filled((5, 3), dtype), order=order)  # type: ignore[call-overload]
    with open(path, "wb") as file:
        np.lib.format.write_array(file, values, version)
    array = cache.open_array(path)
    same(array[...], values)
    same(np.asarray(array), values)
    same(array[1], values[1])
    assert array.strides == values.strides


def test_names_of_fields_that_are_not_latin(cache: bifolio.Cache, path: str) -> None:
    dtype = np.dtype([("größe", "f4"), ("尺寸", "i8")])
    values = filled((4,), dtype)
    with pytest.warns(UserWarning, match="Stored array in format 3.0"):
        with open(path, "wb") as file:
            np.save(file, values)
    same(cache.open_array(path)[:], values)
    with cache.open_array(path, "w+", dtype=dtype, shape=(2,)) as array:
        array[:] = values[:2]
    same(np.load(path), values[:2])


def test_a_new_array_is_read_by_numpy(cache: bifolio.Cache, path: str) -> None:
    for order, shape in (("C", (7, 3)), ("F", (7, 3)), ("C", ()), ("C", (0, 4)), ("C", 5)):
        with cache.open_array(path, "w+", dtype=">f4", shape=shape, order=order) as array:
            same(np.array(array), np.zeros(shape, ">f4"))
            array[...] = 2.5
        found = np.load(path)
        same(found, np.full(shape, 2.5, ">f4"))
        assert found.flags.f_contiguous or order == "C"
        assert os.path.getsize(path) == 4096 + found.nbytes, "rows of pages do not start at pages"
    many = np.dtype([(f"a long name of a field {number:03}", "u1") for number in range(200)])
    with cache.open_array(path, "w+", dtype=many, shape=3) as array:
        array[:] = np.ones(3, many)
    same(np.load(path), np.ones(3, many))


def test_arguments_are_refused_as_numpy_refuses_them(cache: bifolio.Cache, path: str) -> None:
    with open(path, "wb") as file:
        file.write(bytes(10))
    cases: list[dict[str, Any]] = [
        {"dtype": "i4", "mode": "r"},
        {"dtype": "i4", "mode": "r", "shape": (100,)},
        {"dtype": "i4", "mode": "x"},
        {"dtype": "i4", "mode": "w+"},
        {"dtype": "u1", "mode": "r", "offset": 11},
        {"dtype": "u1", "mode": "r", "offset": -1},
        {"dtype": "u1", "mode": "r", "shape": 3.5},
        {"dtype": "no such type", "mode": "r"},
    ]
    for case in cases:
        theirs = outcome(lambda: np.memmap(path, **case))
        assert isinstance(theirs, type)
        assert outcome(lambda: cache.memmap(path, **case)) is theirs, case
    missing = path + ".missing"
    for mode in ("r", "r+"):
        with pytest.raises(FileNotFoundError) as caught:
            cache.memmap(missing, mode=mode)
        assert caught.value.errno == 2 and caught.value.filename == missing
    # numpy 2.4 dies of SIGSEGV here.
    with pytest.raises(ValueError, match="Python objects"):
        cache.memmap(path, "O", "r")
    with pytest.raises(ValueError, match="copy on write"):
        cache.memmap(path, "u1", "c")


def test_a_file_grows_to_its_shape(cache: bifolio.Cache, path: str) -> None:
    array = cache.memmap(path, "i4", "w+", 3, (4, 2))
    assert os.path.getsize(path) == 3 + 32
    array.close()
    array = cache.memmap(path, "i4", "r+", 3, (8, 2))
    array[7] = 9
    array.close()
    assert os.path.getsize(path) == 3 + 64
    same(np.array(np.memmap(path, "i4", "r", 3, (8, 2)))[7], np.full(2, 9, "i4"))


def test_files_that_are_no_arrays(cache: bifolio.Cache, path: str) -> None:
    def refused(content: bytes, match: str) -> None:
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(ValueError, match=match):
            cache.open_array(path)

    np.save(path + ".npy", np.arange(100))
    with open(path + ".npy", "rb") as file:
        good = file.read()
    refused(b"", "EOF|end")
    refused(b"hello, world", "magic")
    refused(good[:9], "ends")
    refused(good[:60], "ends")
    refused(good[:-1], "but its header says")
    refused(good[:6] + b"\7\0" + good[8:], "version")
    refused(good.replace(b"(100,)", b"(-10,)"), "not valid")
    refused(good.replace(b"(100,)", b"'hey'."), "cannot be read")
    refused(good.replace(b"'<i8'", b"'|O8'"), "Python objects")
    refused(good[:6] + b"\2\0" + b"\xff\xff\xff\xff" + good[10:], "bytes long")


def test_fields_are_views(cache: bifolio.Cache, path: str) -> None:
    dtype = np.dtype([("x", "i2"), ("y", ">f8", (2,)), ("z", "u1")])
    values = filled((50,), dtype)
    values.tofile(path)
    array = cache.memmap(path, dtype, "r+")
    same(array["x"][3:30:4], values["x"][3:30:4])
    same(array["y"][[4, 1]], values["y"][[4, 1]])
    same(array[["z", "x"]][5:7]["z"], values["z"][5:7])
    array["y"][10] = [1.5, 2.5]
    array["z"] = 9
    values["y"][10], values["z"] = [1.5, 2.5], 9
    same(array[:], values)
    with pytest.raises(ValueError, match="no field"):
        array["w"]
    with pytest.raises(ValueError, match="read-only"):
        array[["x", "z"]][0] = (1, 2)
    array.close()
    with open(path, "rb") as file:
        assert file.read() == values.tobytes()


def test_rows_are_appended(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="f4", shape=(0, 3))
    for number in range(100):
        array.append(np.full((number, 3), number, "f4"))
    assert array.shape == (4950, 3)
    expected = np.repeat(np.arange(100, dtype="f4"), range(100))
    same(array[:, 1], expected)
    assert np.load(path).shape == (0, 3)
    array.flush()
    same(np.load(path)[:, 2], expected)
    array.append([[1, 2, 3]])
    del array
    assert np.load(path).shape == (4951, 3)
    array = cache.open_array(path, "r+")
    for wrong in (np.zeros((1, 2)), np.zeros(3)):
        with pytest.raises(ValueError, match="cannot be appended"):
            array.append(wrong)
    with pytest.raises(TypeError, match="cannot append"):
        array.append(np.zeros((1, 3), "c16"))
    with pytest.raises(ValueError, match="whole array"):
        array.T.append(np.zeros((1, 4951)))
    array.close()
    # A file without a header has nothing that tells a part of the array from what follows it.
    short = cache.memmap(path, "u1", "r+", shape=(100,))
    with pytest.raises(ValueError, match="the array ends at 100: truncate"):
        short.append(np.zeros(1, "u1"))
    short.close()
    with cache.memmap(path + "2", "f4", "w+", shape=(2, 3)) as array:
        array.append([[1, 2, 3]])
    assert os.path.getsize(path + "2") == 36


def test_a_large_array_is_not_read_by_accident(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="u1", shape=(cache.memory + 1,))
    for call in (lambda: np.asarray(array), lambda: array + 1, lambda: np.add.reduce(array)):
        with pytest.raises(MemoryError, match="larger than the bound"):
            call()
    if not IS_NUMPY_1:
        assert np.array(array, copy=True).shape == array.shape
        with pytest.raises(ValueError, match="without a copy"):
            np.asarray(array, copy=False)
    small = cache.open_array(path + "2", "w+", dtype="u1", shape=(5,))
    small[:] = range(5)
    assert (small + 1).tolist() == [1, 2, 3, 4, 5]
    assert (small == 3).tolist() == [False, False, False, True, False]
    assert np.sum(small) == 10
    with pytest.raises(TypeError, match="output of a ufunc"):
        small += 1
    with pytest.raises(TypeError, match="output of a ufunc"):
        np.add.at(small, [1], 5)
    where = cache.open_array(path + "3", "w+", dtype="?", shape=(5,))
    where[1] = True
    assert np.add(small, 1, out=np.zeros(5, "u1"), where=where).tolist() == [0, 2, 0, 0, 0]
    assert np.add.reduce(small, where=where) == 1
    target = np.zeros(5, "u1")
    np.add.at(target, small, small)
    assert target.tolist() == [0, 1, 2, 3, 4]


def test_a_large_slice_is_not_read_by_accident(cache: bifolio.Cache, path: str) -> None:
    array = cache.memmap(path, "u1", "w+", shape=(80 << 10, 1 << 10))
    for call in (lambda: array[...], lambda: array[::-1], lambda: array[:, :1000]):
        with pytest.raises(MemoryError, match="rows"):
            call()
    # What a program keeps, such as the rows to train with, stays on the file.
    for part in (array[: int(0.9 * len(array))], array[:], array.rows(0, 70 << 10)[:]):
        assert isinstance(part, bifolio.Array) and len(part) >= 70 << 10
        assert part[:5].tolist() == np.zeros((5, 1 << 10)).tolist()
    assert array[: 60 << 10].nbytes == 60 << 20
    assert array[::2, 0].shape == (40 << 10,)


def test_rows_stay_on_the_file(cache: bifolio.Cache, path: str) -> None:
    values = filled((100, 3), np.dtype("i4"))
    np.save(path + ".npy", values)
    array = cache.open_array(path + ".npy", "r+")
    for start, end in ((0, 90), (90, None), (-10, None), (50, 20), (0, 1000), (-30, -5), (100, 200)):
        part = array.rows(start, end)
        assert isinstance(part, bifolio.Array)
        same(part[...], values[start:end])
        same(np.asarray(part.rows(3, 8)), values[start:end][3:8])
        same(np.asarray(part.T), values[start:end].T)
    part = array.rows(10, 20)
    part[0] = values[10] = 5
    same(array[:], values)
    with pytest.raises(ValueError, match="whole array"):
        part.append([[1, 2, 3]])
    with pytest.raises(IndexError):
        part[10]
    same(np.asarray(list(part)), values[10:20])


@given(
    st.data(),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=7),
    st.sampled_from(DTYPES),
    st.sampled_from("CF"),
    st.sampled_from([0, 13]),
)
def test_some_rows_are_those_of_numpy(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, offset: int
) -> None:
    """Rows that stay on the file: indices of them, chunks, loops, batches of loaders, prefetches."""
    ours, theirs = pair(shape, dtype, order, offset)
    for array, values in ((ours, np.array(theirs)), (ours.T, np.array(theirs).T)):
        start = data.draw(st.integers(-9, 9))
        end = data.draw(st.one_of(st.none(), st.integers(-9, 9)))
        part, expected = array.rows(start, end), values[start:end]
        assert (part.shape, part.dtype, len(part)) == (expected.shape, dtype, len(expected))
        where = data.draw(hnp.arrays(np.int64, st.integers(0, 5), elements=st.integers(-8, 7)))
        wanted = outcome(lambda: expected[where])
        refused = wanted if isinstance(wanted, type) else None
        # In either order: before anything was read, and of rows that are in memory.
        for _ in range(2):
            same(outcome(lambda: part.prefetch(where)), refused)
            same(outcome(lambda: part.__getitems__(where.tolist())), wanted)
        assert outcome(lambda: part.prefetch(start, end)) is None
        key = data.draw(indices(expected.shape))
        hypothesis.note(repr(key))
        same(outcome(lambda: read(part, key)), outcome(lambda: expected[key]))
        rows = data.draw(st.integers(1, 5))
        chunks = part.chunks(rows)
        parts = list(chunks)
        assert len(parts) == len(chunks)
        for number, chunk in enumerate(parts):
            same(chunk, expected[number * rows :][:rows])
        for row, other in zip(part, expected, strict=True):
            same(row, other)
        same(np.asarray(part), expected)
        if dtype.kind in "biufc":
            if expected.size != 1:
                assert outcome(lambda: bool(part)) is ValueError
            else:
                assert bool(part) == bool(expected)
            same(outcome(lambda: np.from_dlpack(part)), outcome(lambda: np.from_dlpack(expected)))
    remove(ours, theirs)


@given(
    st.data(),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6),
    st.sampled_from(DTYPES),
)
def test_appended_rows_are_those_of_numpy(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    path = os.path.join(DIRECTORY.name, f"{next(NUMBERS)}.npy")
    values = filled(shape, dtype)
    array = CACHE.open_array(path, "w+", dtype=dtype, shape=shape)
    array[...] = values
    for seed in range(3):
        inner = data.draw(st.sampled_from([shape[1:]] * 4 + [shape, (2, *shape[1:])]))
        kind = data.draw(st.sampled_from([dtype, dtype, np.dtype("i2"), np.dtype("u1")]))
        rows = filled((data.draw(st.integers(0, 4)), *inner), kind, seed)
        if inner == shape[1:] and np.can_cast(kind, dtype, "same_kind"):
            array.append(rows)
            values = np.concatenate([values, rows.astype(dtype)], dtype=dtype)
        else:
            assert outcome(lambda: array.append(rows)) in (TypeError, ValueError)
        same(read(array, ...), values)
        if data.draw(st.booleans()):
            array.flush()
            same(np.load(path), values)
    array.close()
    same(np.load(path), values)
    os.unlink(path)


NUMERIC = [np.dtype(name) for name in ("u1", "?", "i2", ">i4", "f2", "f4", ">f8", "c16")]


@given(
    st.data(),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
    st.sampled_from(NUMERIC),
    st.sampled_from("CF"),
    st.integers(1, 200),
)
def test_reductions_are_those_of_numpy(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, chunk: int
) -> None:
    ours, theirs = pair(shape, dtype, order, 0)
    ours[...] = theirs[...] = np.random.default_rng(1).integers(0, 99, shape).astype(dtype)
    values = np.array(theirs)
    axes = st.integers(-len(shape), len(shape) - 1) if shape else st.just(-1)
    axis = data.draw(st.one_of(st.none(), axes, st.lists(axes, max_size=3).map(tuple)))
    keepdims = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr("bifolio._array._CHUNK_BYTES", chunk)
        for name in ("sum", "min", "max", "mean"):
            function = getattr(np, name)
            expected = outcome(lambda: function(values, axis=axis, keepdims=keepdims))
            found = outcome(lambda: getattr(ours, name)(axis, keepdims=keepdims))
            also = outcome(lambda: function(ours, axis=axis, keepdims=keepdims))
            hypothesis.note(f"{name}: {found!r}, numpy {expected!r}")
            if isinstance(expected, type):
                assert found is also is expected
                continue
            for mine in (found, also):
                assert type(mine) is type(expected) and mine.dtype == expected.dtype
                assert np.shape(mine) == np.shape(expected)
                np.testing.assert_allclose(mine, expected, 1e-2 if dtype.itemsize == 2 else 1e-6)
            if np.ndim(expected):
                out = np.zeros_like(expected)
                assert function(ours, axis=axis, keepdims=keepdims, out=out) is out
                np.testing.assert_allclose(out, expected, 1e-2 if dtype.itemsize == 2 else 1e-6)
        wanted = data.draw(st.sampled_from(["f8", "i2", "U", ">u4"]))
        same(ours.astype(wanted), values.astype(wanted))
        for value in (5, 200, -1):
            assert (value in ours) == (value in values)
    remove(ours, theirs)


@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.sampled_from("CF"))
def test_another_shape_is_a_view(
    data: st.DataObject, shape: tuple[int, ...], dtype: np.dtype[Any], order: str
) -> None:
    ours, theirs = pair(shape, dtype, order, 13)
    wanted = data.draw(st.lists(st.integers(-1, 8), max_size=4))
    expected = outcome(lambda: np.array(theirs).reshape(wanted))
    found = outcome(lambda: ours.reshape(wanted))
    is_contiguous = np.array(theirs).size < 2 or ours.strides == np.empty(shape, dtype).strides
    if isinstance(expected, type) or not is_contiguous:
        assert found is ValueError
    else:
        assert isinstance(found, bifolio.Array)
        same(read(found, ...), expected)
        same(read(ours.reshape(*wanted), ...), expected)
        same(read(np.reshape(ours, wanted), ...), expected)  # type: ignore[arg-type]
    remove(ours, theirs)


def test_what_an_array_is_in_a_condition(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="i4", shape=(3,))
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)
    assert not array.rows(0, 1)
    array[0] = 4
    assert array.rows(0, 1)
    with pytest.raises(TypeError, match="Cannot cast"):
        array.astype("i1", casting="safe")
    large = cache.memmap(path + "2", "u1", "w+", shape=(8 << 20,))
    large[5 << 20] = 3
    assert large.sum() == 3 and large.max() == 3 and 3 in large and 4 not in large
    assert large.mean() == 3 / (8 << 20)
    with pytest.raises(MemoryError):
        large.astype("i8")


def test_tokens_of_dask_say_what_is_in_the_file(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="i4", shape=(3, 2))
    token = array.__dask_tokenize__()
    assert token == cache.open_array(path).__dask_tokenize__()
    assert token != array.T.__dask_tokenize__() != array.rows(1).__dask_tokenize__()
    os.utime(path, ns=(1, 1))
    assert token != array.__dask_tokenize__()


def test_iteration_does_not_keep_chunks(cache: bifolio.Cache, path: str) -> None:
    structured = np.dtype([("x", "i4"), ("y", "f4")])
    for dtype, shape in (("i4", (50, 3)), (structured, (50,)), (structured, (50, 2))):
        array = cache.open_array(path, "w+", dtype=dtype, shape=shape)
        for row in array:
            assert row.base is None or row.base.nbytes <= row.nbytes
        array.close()


def test_what_a_sequence_answers(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="i4", shape=(4, 3))
    array[:] = np.arange(12).reshape(4, 3)
    assert 3 in array and 77 not in array
    assert array[range(0)].shape == (0, 3)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)
    assert bool(array.rows(1, 2)[:, 0]) and not bool(array.rows(0, 1).T.rows(0, 1))
    copied = np.from_dlpack(array)
    same(copied, array[...])


def test_a_batch_of_a_loader_is_one_call(cache: bifolio.Cache, path: str) -> None:
    """`torch.utils.data` asks a data set for its batches by `__getitems__`, with a list."""
    array = cache.open_array(path, "w+", dtype="i4", shape=(40, 3))
    array[:] = np.arange(120).reshape(40, 3)
    same(array.__getitems__([3, 39, 3]), np.arange(120, dtype="i4").reshape(40, 3)[[3, 39, 3]])
    with pytest.raises(IndexError):
        array.__getitems__([40])


def test_arrays_of_python_2(cache: bifolio.Cache, path: str) -> None:
    values = np.arange(30).reshape(10, 3)
    np.save(path + ".npy", values)
    with open(path + ".npy", "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content.replace(b"(10, 3), }  ", b"(10L, 3L), }"))
    with cache.open_array(path, "r+") as array:
        same(array[...], values)
        array.append([[1, 2, 3]])
    assert np.load(path).shape == (11, 3)


def test_chunks_are_the_rows_in_order(cache: bifolio.Cache, path: str) -> None:
    values = filled((1003, 17), np.dtype("i8"))
    np.save(path + ".npy", values)
    array = cache.open_array(path + ".npy")
    for rows in (1, 10, 1003, 5000, None):
        chunks = array.chunks(rows)
        parts = list(chunks)
        assert len(parts) == len(chunks)
        same(np.concatenate(parts), values)
    same(np.array(list(array)), values)
    with pytest.raises(ValueError):
        array.chunks(0)


def test_large_transfers_and_small_caches(path: str) -> None:
    """Patterns that need many calls, of an array four times the bound."""
    cache = bifolio.Cache("8 MiB")
    shape = (4096, 64, 16)
    values = np.random.default_rng(5).integers(0, 1 << 60, shape)
    array = cache.open_array(path, "w+", dtype="i8", shape=shape)
    array[...] = values
    for key in (
        np.s_[...],
        np.s_[:, 3:60, 2],
        np.s_[::-1],
        np.s_[::7, ::-2, ::3],
        np.s_[:, [1, 50, 3], 4:],
        np.s_[np.arange(4095, -1, -3), 5],
        np.s_[values[:, 0, 0] % 3 == 0],
    ):
        same(array[key], values[key])
        array[key] = array[key] + 1
        values[key] += 1
    array[:, 7] = 5
    values[:, 7] = 5
    same(array[...], values)
    assert cache.stats()["memory_used_bytes"] <= 8 << 20
    cache.close()
    same(np.load(path), values)


def test_views_and_text(cache: bifolio.Cache, path: str) -> None:
    array = cache.open_array(path, "w+", dtype="f4", shape=(1000, 16))
    array[:] = 1
    text = repr(array)
    for part in ("'data'", "(1000, 16)", "float32", "62.5 KiB", "mode r+", "cache of 4.0 MiB"):
        assert part in text, text
    assert "<table>" in array._repr_html_() and "<table>" in cache._repr_html_()
    assert "hits" in str(cache.stats()) and "<table>" in cache.stats()._repr_html_()
    assert isinstance(cache.stats()["reads_misses"], int)
    cache.close()
    assert "closed" in repr(array) and "closed" in repr(cache)
    with pytest.raises(ValueError, match="closed"):
        array[0]
    with pytest.raises(ValueError, match="closed"):
        cache.stats()


def test_sizes() -> None:
    sizes = {"4 GiB": 4 << 30, "512M": 512 << 20, "1.5 kB": 1500, "77": 77, " 2tib ": 2 << 40}
    for text, size in sizes.items():
        assert bifolio.parse_size(text) == size
    for wrong in ("", "GiB", "-1 GiB", "4 GB/s", "1e9", "4 apples"):
        with pytest.raises(ValueError, match="is not a size"):
            bifolio.parse_size(wrong)
    with pytest.raises(ValueError, match="memory"):
        bifolio.Cache(1)
    main, worker = bifolio.divide("1 GiB", 3)
    assert main + 3 * worker == 1 << 30
    assert bifolio.Cache().memory > 16 << 20
    cache = bifolio.Cache("64 MiB", worker_memory="1 MiB")
    assert (cache.memory, cache.worker_memory) == (64 << 20, 1 << 20)
    cache.memory = 32 << 20
    assert cache.stats()["memory_bound_bytes"] == 32 << 20
