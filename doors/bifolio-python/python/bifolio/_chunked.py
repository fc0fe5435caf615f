"""What is computed of a whole array, a chunk at a time: results are small, and so is the memory.

Chunks are read in the order of the file, ahead of the loop. All functions have numpy's results,
except that sums of floats are added up in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from ._array import Array

Axis = SupportsIndex | tuple[SupportsIndex, ...] | None
#: Reduces axes of a chunk, and leaves them with the length 1.
Reduce = Callable[[NDArray[Any], tuple[int, ...]], NDArray[Any]]


def axes_of(axis: Axis, dimensions: int) -> tuple[int, ...]:
    """Returns axes that are not negative, in order.

    Raises:
        AxisError: there is no such axis.
        ValueError: an axis is given twice.
    """
    if axis is None:
        return tuple(range(dimensions))
    given = [operator.index(each) for each in (axis if isinstance(axis, tuple) else (axis,))]
    for each in given:
        if not -dimensions <= each < dimensions:
            raise np.exceptions.AxisError(each, dimensions)
    axes = sorted(each % dimensions for each in given)
    if len(set(axes)) < len(axes):
        raise ValueError("duplicate value in 'axis'")
    return tuple(axes)


def reduce(
    array: Array, axes: tuple[int, ...], combine: np.ufunc, of_chunk: Reduce, keepdims: bool
) -> Any:
    """Reduces `axes` of each chunk with `of_chunk`, and those results with `combine`."""
    dimensions = array.ndim
    if dimensions > 1 and array.strides[0] < array.strides[-1]:
        # Fortran order: chunks of the last axis are what lies together in the file.
        flipped = tuple(sorted(dimensions - 1 - axis for axis in axes))

        def of_flipped(chunk: NDArray[Any], _: tuple[int, ...]) -> NDArray[Any]:
            return of_chunk(chunk.T, axes).T

        kept = reduce(array.T, flipped, combine, of_flipped, keepdims=True)
        return _without(np.asarray(kept).T, axes, keepdims)
    if array.size == 0 or dimensions == 0:
        return _without(of_chunk(np.array(array), axes), axes, keepdims)
    if 0 not in axes:
        parts = [of_chunk(chunk, axes) for chunk in array.chunks()]
        return _without(np.concatenate(parts), axes, keepdims)
    total: NDArray[Any] | None = None
    for chunk in array.chunks():
        part = of_chunk(chunk, axes)
        total = part if total is None else combine(total, part)
    assert total is not None
    return _without(total, axes, keepdims)


def _without(kept: NDArray[Any], axes: tuple[int, ...], keepdims: bool) -> Any:
    """Returns a result with the reduced axes, or without them; a scalar if none is left."""
    return kept if keepdims else np.squeeze(kept, axes)[()]


def at_once(array: Array, name: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of numpy on the whole array, which is read."""
    return getattr(np.asarray(array), name)(*arguments, **options)


def into(out: NDArray[Any] | None, result: Any) -> Any:
    """Returns a result, in `out` if it is given."""
    if out is None:
        return result
    if np.shape(out) != np.shape(result):
        raise ValueError(f"the output has the shape {np.shape(out)}, not {np.shape(result)}")
    out[...] = result
    return out


def total(array: Array, axis: Axis, dtype: DTypeLike | None, keepdims: bool) -> Any:
    """Returns the sum, as :func:`numpy.sum`."""
    axes = axes_of(axis, array.ndim)

    def of_chunk(chunk: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
        found: NDArray[Any] = np.add.reduce(chunk, axes, dtype, keepdims=True)
        return found

    return reduce(array, axes, np.add, of_chunk, keepdims)


def mean(array: Array, axis: Axis, dtype: DTypeLike | None, keepdims: bool) -> Any:
    """Returns the mean, as :func:`numpy.mean`."""
    axes = axes_of(axis, array.ndim)
    count = 1
    for each in axes:
        count *= array.shape[each]
    if count == 0:
        # With numpy's warning.
        return np.mean(np.array(array), axes, dtype, keepdims=keepdims)
    kind = array.dtype
    wanted = np.dtype(dtype) if dtype is not None else kind if kind.kind in "fc" else np.dtype("f8")
    # Of many chunks: floats of 16 and 32 bits would lose what they add up.
    wide = np.result_type(wanted, "f8") if wanted.kind in "fc" else wanted
    found = total(array, axes, wide, keepdims) / count
    return found.astype(wanted.newbyteorder("="))


def extreme(array: Array, ufunc: np.ufunc, axis: Axis, keepdims: bool) -> Any:
    """Returns the least or the greatest element, as :func:`numpy.min` and :func:`numpy.max`."""
    axes = axes_of(axis, array.ndim)

    def of_chunk(chunk: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
        found: NDArray[Any] = ufunc.reduce(chunk, axes, keepdims=True)
        return found

    return reduce(array, axes, ufunc, of_chunk, keepdims)


def converted(array: Array, dtype: np.dtype[Any], casting: Any) -> NDArray[Any]:
    """Returns the elements with another type, without a copy of the array with its own one."""
    if not np.can_cast(array.dtype, dtype, casting):
        raise TypeError(
            f"Cannot cast array data from {array.dtype!r} to {dtype!r} according to the rule "
            f"{casting!r}"
        )
    if dtype.subdtype is not None or array.ndim == 0 or array.size == 0:
        return np.array(array).astype(dtype)
    if array.ndim > 1 and array.strides[0] < array.strides[-1]:
        return converted(array.T, dtype, casting).T
    if dtype.itemsize == 0:
        # As long as the longest element.
        return np.concatenate([chunk.astype(dtype) for chunk in array.chunks()])
    values = np.empty(array.shape, dtype)
    start = 0
    for chunk in array.chunks():
        values[start : start + len(chunk)] = chunk.astype(dtype)
        start += len(chunk)
    return values
