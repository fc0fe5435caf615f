"""The class :class:`Array`: an array that stays on its file."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import _chunked, _core, _index, _npy
from ._cache import CREATE, READ, READ_WRITE, Cache, Handle
from ._index import Loop, all_in_bounds, in_bounds, load, select, store
from ._sizes import format_size
from ._stats import html_table

Shape: TypeAlias = SupportsIndex | Iterable[SupportsIndex]

_MODES = {"readonly": "r", "copyonwrite": "c", "readwrite": "r+", "write": "w+"}


class Array(NDArrayOperatorsMixin):
    """An array on a file: indexing reads through the cache, and returns ordinary numpy arrays.

    Made by :meth:`Cache.open_array` and :meth:`Cache.memmap`. An index has numpy's meaning and
    raises numpy's errors. What it costs:

    ================================  ==========================================================
    index                             reads
    ================================  ==========================================================
    ``a[i]``, ``a[i:j]``              one range of the file
    ``a[indices]``, ``a[mask]``       one batch: a read for each row, many of them at a time
    ``a[:, j]``, ``a[i:j, ::k]``      the bytes between elements too, if they are at most 512
    ``a[:, indices]``                 a read for each element
    ================================  ==========================================================

    Operators and ufuncs read the whole array, as :func:`numpy.asarray` does, and refuse an array
    that is larger than the bound of the cache.

    An array can be used by several threads. It keeps its cache. Pickled, it is its path and
    layout: another process opens the file again, for reading, in a cache of its own with the bound
    :attr:`Cache.worker_memory`.
    """

    def __init__(
        self,
        handle: Handle,
        base: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        mode: str,
        header: _npy.Header | None = None,
        is_whole: bool = False,
    ) -> None:
        self._handle = handle
        self._base = base
        self._dtype = dtype
        self._shape = shape
        self._strides = strides
        self._mode = mode
        self._header = header
        self._is_whole = is_whole
        self._whole_rows = self._compile_rows()
        #: Says, in an append, if the file is still the one that was opened.
        self._epoch = handle.core().epoch() if is_whole else 0

    def _compile_rows(self) -> _core.Rows | None:
        """Returns what reads rows in one compiled call; `None` if they are not contiguous."""
        shape, strides, item_bytes = self._shape, self._strides, self._dtype.itemsize
        if not shape or strides[1:] != _strides(shape[1:], item_bytes, "C"):
            return None
        row_bytes = math.prod(shape[1:]) * item_bytes
        return _core.Rows(self._base, strides[0], row_bytes, shape[1:], self._dtype, np.empty)

    # What numpy's arrays have.

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes, elements."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances of neighbours in the file, bytes, for each axis."""
        return self._strides

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        """Length of an element, bytes."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Length of all elements, bytes."""
        return self.size * self._dtype.itemsize

    @property
    def offset(self) -> int:
        """Position of the first element in the file, bytes."""
        return self._base

    @property
    def filename(self) -> str:
        """Absolute path of the file."""
        return self._handle.path

    @property
    def mode(self) -> str:
        """``"r"`` or ``"r+"``."""
        return self._mode

    @property
    def cache(self) -> Cache:
        """The cache."""
        return self._handle.cache

    @property
    def T(self) -> Array:  # noqa: N802
        """The same array with its axes in the opposite order. Reads nothing."""
        return self._view(self._base, self._dtype, self._shape[::-1], self._strides[::-1])

    def _view(
        self,
        base: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        mode: str | None = None,
    ) -> Array:
        return Array(self._handle, base, dtype, shape, strides, mode or self._mode)

    def _field(self, name: str | list[str]) -> Array:
        """Returns a field of a structured array. Reads nothing."""
        fields = self._dtype.fields
        if fields is None:
            raise IndexError(_index.NOT_AN_INDEX)
        if isinstance(name, list):
            try:
                dtype = self._dtype[name]
            except KeyError as error:
                raise KeyError(f"no field of name {error.args[0]}") from None
            # Its elements span the other fields, which a write must not change.
            return self._view(self._base, dtype, self._shape, self._strides, "r")
        if name not in fields:
            raise ValueError(f"no field of name {name}")
        dtype, offset = fields[name][:2]
        shape, strides = self._shape, self._strides
        if dtype.subdtype is not None:
            dtype, inner = dtype.subdtype
            shape, strides = shape + inner, strides + _strides(inner, dtype.itemsize, "C")
        return self._view(self._base + offset, dtype, shape, strides)

    # Reads.

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __getitem__(self, key: Any) -> Any:
        rows, kind = self._whole_rows, type(key)
        if rows is not None:
            if kind is int:
                return rows.row(self._handle.core(), key, self._shape[0])
            if kind is slice:
                found = rows.consecutive(self._handle.core(), key, self._shape[0])
                if found is not None:
                    return found
                if (start_end := self._too_large(key)) is not None:
                    return self.rows(*start_end)
            elif kind is np.ndarray or (kind is list and key and type(key[0]) is int):
                indices = np.asarray(key)
                if indices.dtype is _INT64 and indices.ndim == 1:
                    found = rows.take(self._handle.core(), indices, self._shape[0])
                    if found is not None:
                        return found
        if isinstance(key, str) or (
            isinstance(key, list) and key and all(isinstance(name, str) for name in key)
        ):
            return self._field(key)
        selection = select(key, self._shape, self._strides, self._base)
        if all(loop.offsets is None for loop in selection.loops):
            result_bytes = math.prod(selection.shape) * self._dtype.itemsize
            self._check_size(result_bytes, _SLICE_BYTES_FREE)
        return self._load(selection)

    def _too_large(self, key: slice) -> tuple[int, int] | None:
        """Returns the first row of consecutive ones and the end, if they are too many to read."""
        start, end, step = key.indices(self._shape[0])
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        most = max(self.cache._result_bytes_max, _SLICE_BYTES_FREE)
        return (start, end) if step == 1 and (end - start) * row_bytes > most else None

    def _check_size(self, result_bytes: int, bytes_free: int) -> None:
        """Refuses a result that a program reads by accident: it would be killed.

        Raises:
            MemoryError: it is larger than the bound, and than `bytes_free`.
        """
        most = self.cache._result_bytes_max
        if result_bytes > max(most, bytes_free):
            raise MemoryError(
                f"a result of {format_size(result_bytes)} is larger than the bound of the cache, "
                f"{format_size(most)}: rows(start, end) is a part of {self!r} that stays on the "
                "file; chunks() and arrays of indices read some rows at a time; "
                "numpy.array(a, copy=True) reads all"
            )

    def _load(self, selection: _index.Selection) -> Any:
        values = np.empty([loop.count for loop in selection.loops], self._dtype)
        load(self._handle.core(), values, selection.loops, selection.base)
        values = selection.from_file_order(values)
        return values[()] if selection.is_scalar else values

    def _row_loops(self, indices: NDArray[np.int64]) -> tuple[Loop, ...]:
        rest = zip(self._shape[1:], self._strides[1:], strict=True)
        offsets = indices * self._strides[0]
        first = Loop(indices.size, self._strides[0], offsets)
        return first, *(Loop(count, stride) for count, stride in rest)

    def _rows(self, indices: NDArray[np.int64], out: NDArray[Any] | None) -> NDArray[Any]:
        """Reads rows in one batch: those of `indices`, one axis of numbers that are in bounds."""
        file = self._handle.core()
        if self._whole_rows is not None:
            numbers = np.ascontiguousarray(indices)
            found: NDArray[Any] | None = self._whole_rows.take(file, numbers, len(self), out)
            assert found is not None
            return found
        if out is None:
            out = np.empty((indices.size, *self._shape[1:]), self._dtype)
        load(file, out, self._row_loops(indices), self._base)
        return out

    def take(
        self,
        indices: ArrayLike,
        axis: int | None = 0,
        out: NDArray[Any] | None = None,
        mode: str = "raise",
    ) -> Any:
        """Returns the elements at `indices` along an axis, as :func:`numpy.take` does.

        Args:
            indices: integers, of any shape.
            axis: the axis. Unlike in numpy the first one if not given: rows. With `None`, indices
                count elements of the flattened array.
            out: where the result goes: of its shape. Rows are read into it without a copy if it is
                contiguous and has the dtype of the array.
            mode: what happens to an index that is out of bounds: ``"raise"``, ``"wrap"`` or
                ``"clip"``.

        Returns:
            `out`, or a new array of shape ``shape[:axis] + indices.shape + shape[axis + 1:]``.

        Raises:
            IndexError: an index is out of bounds.
            ValueError: `out` has another shape.
            OSError: an element cannot be read.
        """
        rows = self._whole_rows
        if rows is not None and axis == 0 and mode == "raise" and type(indices) is np.ndarray:
            if indices.dtype is _INT64 and indices.ndim == 1:
                if out is None or self._is_room(out, indices.shape + self._shape[1:]):
                    found = rows.take(self._handle.core(), indices, self._shape[0], out)
                    if found is not None:
                        return found
        where = _integers(indices)
        where = where.astype(np.int64) if where.dtype.kind == "b" else where
        number = 0 if axis is None else operator.index(axis)
        if not -self.ndim <= number < max(self.ndim, 1):
            raise np.exceptions.AxisError(number, self.ndim)
        number %= max(self.ndim, 1)
        length = self.size if axis is None else (self._shape[number] if self._shape else 1)
        if mode == "wrap" and length:
            where = where % length
        elif mode == "clip" and length:
            where = np.clip(where, 0, length - 1)
        elif mode not in ("raise", "wrap", "clip"):
            raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got {mode!r})")
        where = all_in_bounds(where, length, number)
        if axis is None:
            where_all = np.unravel_index(where, self._shape) if self._shape else ()
            result = self[where_all] if self._shape else self[np.newaxis][where]
        elif number == 0 and self._shape:
            shape = where.shape + self._shape[1:]
            if out is not None and self._is_room(out, shape):
                flat = out.reshape((where.size, *self._shape[1:]))
                self._rows(where.reshape(-1), flat)
                return out
            result = self._rows(where.reshape(-1), None).reshape(shape)
            result = result[()] if not shape else result
        else:
            result = self[(slice(None),) * number + (where if where.ndim else int(where),)]
        if out is None:
            return result
        if out.shape != np.shape(result):
            raise ValueError(
                f"output array does not match result of ndarray.take: it has the shape "
                f"{out.shape}, not {np.shape(result)}"
            )
        out[...] = result
        return out

    def _is_room(self, out: NDArray[Any], shape: tuple[int, ...]) -> bool:
        """Returns `True` if rows can be read into `out` without a copy."""
        flags = out.flags
        is_same = out.shape == shape and out.dtype == self._dtype
        return is_same and flags.c_contiguous and flags.writeable

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        if copy is False:
            raise ValueError("an array on a file cannot become a numpy array without a copy")
        if copy is None:
            self._check_size(self.nbytes, 0)
        selection = select(..., self._shape, self._strides, self._base)
        values: NDArray[Any] = np.asarray(self._load(selection))
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        # `torch.as_tensor` and others would read row by row, as of any sequence.
        return np.asarray(self).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # memory of the CPU

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        targets = list(options.get("out") or ())
        if method == "at":
            targets += inputs[:1]
        if any(isinstance(target, Array) for target in targets):
            raise TypeError(
                "an array on a file cannot be the output of a ufunc; assign to it instead: "
                "a[...] = .."
            )
        arrays = [np.asarray(each) if isinstance(each, Array) else each for each in inputs]
        for name, option in options.items():
            if isinstance(option, Array):
                options[name] = np.asarray(option)
        return getattr(ufunc, method)(*arrays, **options)

    def __bool__(self) -> bool:
        if self.size == 1:
            return bool(np.asarray(self).reshape(-1)[0])
        raise ValueError(
            "The truth value of an array with other than one element is ambiguous. "
            "Use a.any() or a.all()"
        )

    def __contains__(self, value: Any) -> bool:
        if not self._shape:
            return bool((np.asarray(self) == value).any())
        return any(bool((chunk == value).any()) for chunk in self.chunks())

    def rows(self, start: int = 0, end: int | None = None) -> Array:
        """Returns the rows from `start` to `end` as an array that stays on the file. Reads nothing.

        Args:
            start: the first row, with the meaning that it has in a slice.
            end: the row after the last; the end of the array if not given.

        Returns:
            A view: assignments change the file. It cannot grow.
        """
        start, end, _ = slice(start, end).indices(len(self))
        shape = max(end - start, 0), *self._shape[1:]
        base = self._base + (start * self._strides[0] if shape[0] else 0)
        return self._view(base, self._dtype, shape, self._strides)

    def reshape(
        self, *shape: SupportsIndex | Iterable[SupportsIndex], order: str = "C"
    ) -> Array:
        """Returns the same elements in another shape, as an array on the file. Reads nothing.

        Args:
            shape: lengths of the axes, or a tuple of them; one may be -1.
            order: ``"C"``.

        Raises:
            ValueError: another number of elements; an array that is not contiguous on the file, in
                C order, such as a transposed one.
        """
        if order != "C":
            # `numpy.reshape` reads the array then.
            raise TypeError(f"the order {order!r} is not that of the file")
        wanted: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
        lengths = [operator.index(length) for length in wanted]
        if lengths.count(-1) == 1:
            rest = math.prod(length for length in lengths if length != -1)
            if rest > 0 and self.size % rest == 0:
                lengths[lengths.index(-1)] = self.size // rest
        if min(lengths, default=0) < 0 or math.prod(lengths) != self.size:
            raise ValueError(f"cannot reshape array of size {self.size} into shape {tuple(wanted)}")
        if self.size > 1 and self._strides != _strides(self._shape, self.itemsize, "C"):
            raise ValueError(
                "only an array that is contiguous on the file, in C order, has another shape "
                "there: reshape what is read of it"
            )
        strides = _strides(tuple(lengths), self.itemsize, "C")
        return self._view(self._base, self._dtype, tuple(lengths), strides)

    # Of the whole array, a chunk at a time; with options that have no name here, at once.

    def sum(
        self,
        axis: _chunked.Axis = None,
        dtype: DTypeLike | None = None,
        out: NDArray[Any] | None = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the sum of the elements, as :meth:`numpy.ndarray.sum`, a chunk at a time."""
        if options or not self._shape:
            return _chunked.at_once(self, "sum", axis, dtype, out, keepdims, **options)
        return _chunked.into(out, _chunked.total(self, axis, dtype, keepdims))

    def mean(
        self,
        axis: _chunked.Axis = None,
        dtype: DTypeLike | None = None,
        out: NDArray[Any] | None = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the mean of the elements, as :meth:`numpy.ndarray.mean`, a chunk at a time.

        Sums of floats have at least 64 bits, so that those of many rows are exact enough.
        """
        if options or not self._shape or self._dtype.kind not in "fciub":
            return _chunked.at_once(self, "mean", axis, dtype, out, keepdims, **options)
        return _chunked.into(out, _chunked.mean(self, axis, dtype, keepdims))

    def min(
        self,
        axis: _chunked.Axis = None,
        out: NDArray[Any] | None = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the least element, as :meth:`numpy.ndarray.min`, a chunk at a time."""
        if options or not self._shape:
            return _chunked.at_once(self, "min", axis, out, keepdims, **options)
        return _chunked.into(out, _chunked.extreme(self, np.minimum, axis, keepdims))

    def max(
        self,
        axis: _chunked.Axis = None,
        out: NDArray[Any] | None = None,
        keepdims: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the greatest element, as :meth:`numpy.ndarray.max`, a chunk at a time."""
        if options or not self._shape:
            return _chunked.at_once(self, "max", axis, out, keepdims, **options)
        return _chunked.into(out, _chunked.extreme(self, np.maximum, axis, keepdims))

    def astype(self, dtype: DTypeLike, *, casting: Any = "unsafe") -> NDArray[Any]:
        """Returns the elements with another type, in memory, a chunk at a time.

        Raises:
            MemoryError: the result is larger than the bound of the cache.
            TypeError: `casting` does not allow it.
        """
        wanted = np.dtype(dtype)
        self._check_size(self.size * wanted.itemsize, 0)
        return _chunked.converted(self, wanted, casting)

    def chunks(self, rows: int | None = None) -> Chunks:
        """Iterates over the array in order, in chunks of consecutive rows.

        Args:
            rows: rows of each chunk but the last; as many as make about 8 MiB if not given.

        Returns:
            An iterable with a length, for ``for`` and progress bars such as ``tqdm``.
        """
        return Chunks(self, rows)

    def __iter__(self) -> Iterator[Any]:
        if not self._shape:
            raise TypeError("iteration over a 0-d array")
        for chunk in self.chunks():
            for row in chunk:
                # A view would keep the whole chunk in memory.
                yield row.copy() if isinstance(row, (np.ndarray, np.void)) else row

    def __getitems__(self, indices: ArrayLike) -> Any:
        """Returns the rows `indices`: a batch of ``torch.utils.data.DataLoader`` is one call then."""
        return self.take(indices)

    @overload
    def gather(
        self, starts: ArrayLike, lengths: SupportsIndex, *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]: ...

    @overload
    def gather(
        self, starts: ArrayLike, lengths: ArrayLike, *, out: NDArray[Any] | None = None
    ) -> tuple[NDArray[Any], NDArray[np.int64]]: ...

    def gather(
        self,
        starts: ArrayLike,
        lengths: SupportsIndex | ArrayLike,
        *,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any] | tuple[NDArray[Any], NDArray[np.int64]]:
        """Reads consecutive rows from each of `starts` on, in one batch.

        Windows of one length, as of tokens or of a time series, or ragged rows, as of a sparse
        matrix whose row `i` has the elements from ``offsets[i]`` to ``offsets[i + 1]``:

        >>> import bifolio, numpy as np
        >>> cache = bifolio.Cache("4 MiB")
        >>> a = cache.open_array(path, "w+", dtype="i8", shape=(100,))
        >>> a[:] = np.arange(100)
        >>> a.gather([10, 70], 3)
        array([[10, 11, 12],
               [70, 71, 72]])
        >>> a.gather([10, 70, 20], [2, 0, 3])
        (array([10, 11, 20, 21, 22]), array([0, 2, 2, 5]))
        >>> cache.close()

        Args:
            starts: the first row of each part; a negative number counts from the end.
            lengths: the number of rows of all parts, or of each.
            out: where the rows go: a contiguous array with the dtype and the shape of the result.

        Returns:
            For one length an array of the shape ``starts.shape + (length,) + a.shape[1:]``. For many
            all rows in one axis, and where each part starts there, with the end of the last.

        Raises:
            IndexError: a row is out of bounds; unlike in a slice, none is left out.
            ValueError: a negative length; `lengths` or `out` has another shape.
            OSError: a row cannot be read.
        """
        count = len(self)
        if type(starts) is np.ndarray and type(lengths) is int and out is None:
            if starts.dtype is _INT64 and starts.ndim == 1 and starts.flags.c_contiguous:
                if self._whole_rows is not None and lengths >= 0:
                    file = self._handle.core()
                    windows: NDArray[Any] = self._whole_rows.gather(file, starts, lengths, count)
                    return windows
        where = _integers(starts)
        if where.dtype.kind == "u":
            where = np.minimum(where.astype(np.uint64), np.iinfo(np.int64).max)
        where = np.asarray(where, np.int64, order="C")
        many = lengths if isinstance(lengths, np.ndarray) and lengths.ndim else None
        length = 0
        if many is None:
            try:
                length = operator.index(lengths)  # type: ignore[arg-type]
            except TypeError:
                many = np.asarray(lengths)
        if many is None:
            if length < 0:
                raise ValueError("negative lengths are not allowed")
            return self._windows(where, length, out)
        each = np.asarray(_integers(many), np.int64, order="C")
        if where.ndim != 1 or each.shape != where.shape:
            raise ValueError(
                f"lengths have the shape {each.shape}, and starts {where.shape}: one axis of each"
            )
        if each.size and each.min() < 0:
            raise ValueError("negative lengths are not allowed")
        offsets = np.zeros(each.size + 1, np.int64)
        np.cumsum(each, out=offsets[1:])
        total = int(offsets[-1])
        self._check_room(out, (total, *self._shape[1:]))
        if self._whole_rows is not None:
            file = self._handle.core()
            return self._whole_rows.gather_ragged(file, where, each, total, count, out), offsets
        _check_parts(where, each, count)
        firsts = np.where(where < 0, where + count, where)
        rows = np.repeat(firsts - offsets[:-1], each) + np.arange(total)
        return self._rows(rows, out), offsets

    def _windows(
        self, starts: NDArray[np.int64], length: int, out: NDArray[Any] | None
    ) -> NDArray[Any]:
        """Reads `length` rows from each of `starts` on."""
        count = len(self)
        shape = (*starts.shape, length, *self._shape[1:])
        self._check_room(out, shape)
        if self._whole_rows is not None:
            found: NDArray[Any] = self._whole_rows.gather(
                self._handle.core(), starts, length, count, out
            )
            return found.reshape(shape) if out is None else out
        _check_parts(starts, length, count)
        firsts = np.where(starts < 0, starts + count, starts)
        rows = (firsts[..., np.newaxis] + np.arange(length)).reshape(-1)
        flat = None if out is None else out.reshape((rows.size, *self._shape[1:]))
        found = self._rows(rows, flat)
        return found.reshape(shape) if out is None else out

    def _check_room(self, out: NDArray[Any] | None, shape: tuple[int, ...]) -> None:
        """Refuses an `out` that rows cannot be read into.

        Raises:
            ValueError: it has another shape or dtype, or is read-only or not contiguous.
        """
        if out is not None and not self._is_room(out, shape):
            raise ValueError(
                f"out must be a contiguous and writeable array of {self._dtype} with the shape "
                f"{shape}; it has {out.dtype} and {out.shape}"
            )

    def prefetch(
        self, start: SupportsIndex | ArrayLike = 0, end: SupportsIndex | None = None
    ) -> None:
        """Starts to read rows into the cache, and does not wait.

        With an array of indices, the next batch is read while the program works on this one:

        >>> import bifolio, numpy as np
        >>> cache = bifolio.Cache("4 MiB")
        >>> a = cache.open_array(path, "w+", dtype="i8", shape=(1000, 8))
        >>> batches = np.random.default_rng(0).permutation(1000).reshape(10, 100)
        >>> for batch, following in zip(batches, [*batches[1:], None]):
        ...     rows = a[batch]
        ...     if following is not None:
        ...         a.prefetch(following)
        >>> cache.close()

        Args:
            start: the first row; or indices of rows, which may be in any order. Those of an array
                in Fortran order are ignored.
            end: the row after the last; only after a first row. At most a quarter of the bound is
                read.

        Raises:
            IndexError: an index is out of bounds.
        """
        if getattr(start, "ndim", 0) or not hasattr(start, "__index__"):
            if end is not None:
                raise TypeError("indices have no end")
            rows, count = self._whole_rows, len(self)
            where = all_in_bounds(_integers(start), count, 0)  # type: ignore[arg-type]
            if rows is not None:
                flat = np.ascontiguousarray(where)
                rows.prefetch(self._handle.core(), flat, count)
            return
        first, last, _ = slice(start, end).indices(len(self))
        if first < last and self._strides[0] > 0:
            position = self._base + first * self._strides[0]
            self._handle.core().prefetch(position, self._base + last * self._strides[0])

    # Writes.

    def _core_to_write(self) -> _core.File:
        if self._mode == "r":
            raise ValueError("assignment destination is read-only")
        return self._handle.core_to_write()

    def __setitem__(self, key: Any, value: Any) -> None:
        file = self._core_to_write()
        if type(value) is np.ndarray and self._assign_rows(file, key, value):
            return
        if isinstance(key, str):
            self._field(key)[...] = value
            return
        selection = select(key, self._shape, self._strides, self._base)
        if isinstance(value, Array):
            value = np.asarray(value)
        if not isinstance(value, np.ndarray):
            value = np.array(value, self._dtype)
        while value.ndim > len(selection.shape) and value.shape[0] == 1:
            value = value[0]
        try:
            values = np.broadcast_to(value, selection.shape)
        except ValueError:
            raise ValueError(
                f"could not broadcast input array from shape {value.shape} into shape "
                f"{selection.shape}"
            ) from None
        values = selection.to_file_order(values)
        store(file, values, self._dtype, selection.loops, selection.base)

    def _assign_rows(self, file: _core.File, key: Any, value: NDArray[Any]) -> bool:
        """Writes one row, or consecutive ones, without conversions. Returns `False` for others."""
        kind = type(key)
        if self._whole_rows is None or value.dtype != self._dtype or not value.flags.c_contiguous:
            return False
        if kind is int and value.shape == self._shape[1:]:
            start, row_bytes = in_bounds(key, self._shape[0], 0), self._strides[0]
        elif kind is slice and value.shape[1:] == self._shape[1:] and value.ndim == self.ndim:
            start, end, step = key.indices(self._shape[0])
            if step != 1 or not 0 < len(value) == end - start:
                return False
            row_bytes = value.nbytes // len(value)
        else:
            return False
        if row_bytes == self._strides[0] or kind is int:
            file.write(value, self._base + start * self._strides[0])
            return True
        return False

    def append(self, rows: ArrayLike) -> None:
        """Appends rows to the array and its file.

        All rows are added, or none: also if the call is interrupted. The header of a ``.npy`` file
        says the new length from the next :meth:`flush` or :meth:`close` on, of any object of the
        file. Rows that no header counts, because a program died before its flush, are cut.

        Threads may append at the same time, and so may several `Array` objects of one cache: all
        rows follow each other, and the shape of an object includes those that others appended
        once it appends itself.

        Args:
            rows: of the shape ``(n, *a.shape[1:])``, and of a dtype that can be cast safely or
                within its kind.

        Raises:
            ValueError: another shape; an array in Fortran order, a transposed one, a field, a part,
                or one that ends before its file does; a header without room for the new length; a
                file that was created anew or truncated since.
            OSError: no space; the file has its old length then.
        """
        file = self._core_to_write()
        if not self._is_whole or not self._shape:
            raise ValueError("only a whole array in C order can grow")
        values = np.asarray(rows)
        if not np.can_cast(values.dtype, self._dtype, "same_kind"):
            raise TypeError(f"cannot append {values.dtype} to an array of {self._dtype}")
        if values.ndim != self.ndim or values.shape[1:] != self._shape[1:]:
            raise ValueError(
                f"rows of the shape {values.shape} cannot be appended to an array of the shape "
                f"{self._shape}"
            )
        values = np.ascontiguousarray(values, self._dtype)
        header = None if self._header is None else self._header.parts()
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        file.append_rows(
            self, values, len(values), self._base, row_bytes, self._epoch, header
        )

    def flush(self) -> None:
        """Makes all writes durable.

        Raises:
            OSError: something could not be written; it stays in the cache, and a later call tries
                again.
        """
        self._handle.sync()

    def close(self) -> None:
        """Makes all writes durable and closes the file; views of it, such as `T`, are closed, too.

        Raises:
            OSError: something could not be written. The cache keeps it and tries again when the
                file is opened again, or when the cache is closed.
        """
        self._handle.close()

    def __enter__(self) -> Array:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Copies, other processes, people.

    def __getstate__(self) -> dict[str, Any]:
        self._handle.write_back()
        state = dict(self.__dict__)
        handle = state.pop("_handle")
        del state["_whole_rows"]
        state["_file"] = handle.cache, handle.path, handle.may_write
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache, path, may_write = state.pop("_file")
        self.__dict__.update(state)
        may_write = may_write and not cache._is_worker
        self._handle = Handle(cache, path, READ_WRITE if may_write else READ)
        # Rows are appended through the original.
        self._is_whole = False
        self._whole_rows = self._compile_rows()
        if not may_write:
            self._mode = "r"

    def _rows_of_table(self) -> list[tuple[str, str]]:
        order = "F" if len(self._shape) > 1 and self._strides[0] < self._strides[-1] else "C"
        rows = [
            ("file", self.filename),
            ("shape", " x ".join(map(str, self._shape)) or "()"),
            ("dtype", f"{self._dtype}, order {order}"),
            ("size", format_size(self.nbytes)),
            ("mode", "closed" if self._handle.is_closed else self._mode),
        ]
        lines = dict(self.cache._lines())
        rows += [(name, lines[name]) for name in ("bound", "in use", "hits") if name in lines]
        return rows

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """Returns what identifies the elements, for `dask`: the same in each run."""
        self._handle.write_back()
        status = os.stat(self.filename)
        of_file = self.filename, status.st_ino, status.st_size, status.st_mtime_ns
        descr = np.lib.format.dtype_to_descr(self._dtype)
        return "bifolio.Array", of_file, self._base, str(descr), self._shape, self._strides

    def __repr__(self) -> str:
        rows = dict(self._rows_of_table())
        hits = f", hits {rows['hits']}" if "hits" in rows else ""
        name = os.path.basename(self.filename)
        return (
            f"<bifolio.Array {name!r}: shape {self._shape}, {rows['dtype']}, {rows['size']}, "
            f"mode {rows['mode']}; cache of {rows['bound']}{hits}>"
        )

    def _repr_html_(self) -> str:
        return html_table([("bifolio.Array", ""), *self._rows_of_table()])


_INT64 = np.dtype(np.int64)
#: A slice of up to so many bytes is read whatever the bound is.
_SLICE_BYTES_FREE = 64 << 20
#: Bytes of a chunk if its rows are not given.
_CHUNK_BYTES = 8 << 20


class Chunks:
    """Chunks of consecutive rows of an array; see :meth:`Array.chunks`."""

    def __init__(self, array: Array, rows: int | None) -> None:
        if not array.shape:
            raise TypeError("iteration over a 0-d array")
        if rows is None:
            row_bytes = max(array.nbytes // max(len(array), 1), 1)
            rows = max(_CHUNK_BYTES // row_bytes, 1)
        if rows < 1:
            raise ValueError(f"a chunk cannot have {rows} rows")
        self._array = array
        self._rows = rows

    def __len__(self) -> int:
        return -(-len(self._array) // self._rows)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        array, rows = self._array, self._rows
        for start in range(0, len(array), rows):
            if start + rows < len(array):
                array.prefetch(start + rows, start + 2 * rows)
            key = slice(start, start + rows)
            yield array._load(select(key, array._shape, array._strides, array._base))


def _check_parts(
    starts: NDArray[np.int64], lengths: NDArray[np.int64] | int, count: int
) -> None:
    """Refuses parts that do not lie in an array of `count` rows, as the compiled call does.

    Raises:
        IndexError: a row is out of bounds.
    """
    firsts = np.where(starts < 0, starts + count, starts)
    wrong = (firsts < 0) | (lengths > count - firsts)
    if wrong.any():
        place = int(np.argmax(wrong))
        start, length = starts.flat[place], np.broadcast_to(lengths, starts.shape).flat[place]
        raise IndexError(
            f"{length} rows from {start} on are out of bounds for axis 0 with size {count}"
        )


def _integers(values: ArrayLike) -> NDArray[Any]:
    """Returns an array of integers, or of booleans.

    Raises:
        TypeError: it is an array of something else.
    """
    numbers = np.asarray(values)
    if numbers.size == 0 and numbers.dtype.kind == "f":
        numbers = numbers.astype(np.intp)
    if numbers.dtype.kind not in "iub":
        raise TypeError(
            f"Cannot cast array data from {numbers.dtype!r} to dtype('int64') according to the "
            "rule 'safe'"
        )
    return numbers


def _strides(shape: tuple[int, ...], item_bytes: int, order: str) -> tuple[int, ...]:
    strides = []
    stride = item_bytes
    for length in shape if order == "F" else shape[::-1]:
        strides.append(stride)
        stride *= max(length, 1)
    return tuple(strides if order == "F" else strides[::-1])


def _shape_of(shape: Shape) -> tuple[int, ...]:
    if isinstance(shape, Iterable):
        return tuple(operator.index(length) for length in shape)
    return (operator.index(shape),)


def _check(dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> None:
    if dtype.hasobject:
        raise ValueError(f"elements of {dtype} are Python objects, which are not on a file")
    if any(length < 0 for length in shape):
        raise ValueError("negative dimensions are not allowed")
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F' (got {order!r})")


def _path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return os.path.abspath(os.fsdecode(text))


def open_array(
    cache: Cache,
    path: str | os.PathLike[str],
    mode: str,
    dtype: DTypeLike | None,
    shape: Shape | None,
    order: str,
    repair: bool,
) -> Array:
    """Implements :meth:`Cache.open_array`."""
    if repair and mode != "r+":
        raise ValueError("repair=True changes the file: it needs the mode 'r+'")
    if mode == "w+":
        if shape is None:
            raise ValueError("shape must be given if mode == 'w+'")
        return _create(cache, _path(path), np.dtype(dtype), _shape_of(shape), order)
    if mode not in ("r", "r+"):
        raise ValueError(f"mode must be one of ['r', 'r+', 'w+'] (got {mode!r})")
    if dtype is not None or shape is not None:
        raise ValueError("the file says its dtype and shape; give them only to create one")
    handle = Handle(cache, _path(path), READ if mode == "r" else READ_WRITE)
    file = handle.core()
    # Before the header: an array that replaces this one meanwhile has another number.
    epoch = file.epoch()
    header = _npy.read(file)
    _check(header.dtype, header.shape, "C")
    row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
    if header.shape and (rows := file.rows(header.length, row_bytes)) is not None:
        # Another object of this cache has appended rows that the header does not count yet.
        header = replace(header, shape=(rows, *header.shape[1:]))
    order = "F" if header.fortran_order else "C"
    array = _array(handle, header.length, header.dtype, header.shape, order, mode, header)
    array._epoch = epoch
    length, end = file.len(), header.length + array.nbytes
    if end > length:
        raise ValueError(
            f"{array.filename} is {length} bytes long, but its header says {end}"
        )
    if repair:
        file.cut(end)
    return array


def _create(
    cache: Cache, path: str, dtype: np.dtype[Any], shape: tuple[int, ...], order: str
) -> Array:
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = shape + inner
    _check(dtype, shape, order)
    header = _npy.new(dtype, shape, order == "F")
    handle = Handle(cache, path, CREATE)
    # One call, which also tells other objects of the file. Other processes find an array from now
    # on.
    handle.core().create(header.encode(), header.length + math.prod(shape) * dtype.itemsize)
    return _array(handle, header.length, dtype, shape, order, "r+", header)


def _array(
    handle: Handle,
    base: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: str,
    mode: str,
    header: _npy.Header | None = None,
) -> Array:
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = shape + inner
    strides = _strides(shape, dtype.itemsize, order)
    is_whole = order == "C" or len(shape) == 1
    return Array(handle, base, dtype, shape, strides, mode, header, is_whole)


def memmap(
    cache: Cache,
    filename: str | os.PathLike[str],
    dtype: DTypeLike,
    mode: str,
    offset: int,
    shape: Shape | None,
    order: str,
) -> Array:
    """Implements :meth:`Cache.memmap`."""
    mode = _MODES.get(mode, mode)
    if mode not in ("r", "c", "r+", "w+"):
        modes = ["r", "c", "r+", "w+", *_MODES]
        raise ValueError(f"mode must be one of {modes!r} (got {mode!r})")
    if mode == "c":
        raise ValueError("mode 'c' (copy on write) is not supported: copy what you change")
    if mode == "w+" and shape is None:
        raise ValueError("shape must be given if mode == 'w+'")
    element = np.dtype(dtype)
    offset = operator.index(offset)
    if offset < 0:
        raise OverflowError("memory mapped offset must be positive")
    wanted = None if shape is None else _shape_of(shape)
    _check(element, wanted or (), order)
    access = {"r": READ, "r+": READ_WRITE, "w+": CREATE}[mode]
    handle = Handle(cache, _path(filename), access)
    if mode == "w+":
        handle.core().create(b"", 0)
    length = handle.core().len()
    if wanted is None:
        left = length - offset
        if left < 0:
            raise ValueError("negative dimensions are not allowed: the file ends before the offset")
        if element.itemsize == 0 or left % element.itemsize:
            raise ValueError("Size of available data is not a multiple of the data-type size.")
        wanted = (left // element.itemsize,)
    array = _array(handle, offset, element, wanted, order, "r" if mode == "r" else "r+")
    end = offset + array.nbytes
    if length < end:
        if mode == "r":
            raise ValueError(
                f"mmap length is greater than file size: the array ends at {end}, "
                f"{array.filename} at {length}"
            )
        handle.core_to_write().set_len(end)
    return array


__all__ = ["Array", "Chunks", "memmap", "open_array"]
