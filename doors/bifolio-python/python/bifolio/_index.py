"""Indices of arrays as runs of bytes in a file.

An index comes down to *loops*: one for each axis of the result, with a number of steps and the
distance in bytes between them, and one for all integer arrays and masks together, which has a list
of distances instead. :func:`select` finds the loops, with the rules and the errors of numpy.
:func:`load` and :func:`store` walk them from the largest distance to the smallest, which is the
order of the file, and pass batches of positions to the compiled module.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core

#: Most positions of one call: 2 MiB of them.
POSITIONS_MAX = 1 << 18
#: Most bytes that are converted and written at a time.
_STORE_BYTES_MAX = 16 << 20

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Loop:
    """An axis of a result: `count` steps that are `stride` bytes apart, or at `offsets`."""

    count: int
    stride: int
    offsets: Offsets | None = None

    def part(self, start: int, end: int) -> tuple[Loop, int]:
        """Returns some of the steps, and the bytes from the first step of all to theirs."""
        if self.offsets is None:
            return Loop(end - start, self.stride), start * self.stride
        return Loop(end - start, self.stride, self.offsets[start:end]), 0

    def steps(self) -> Offsets:
        """Returns the distances of all steps, bytes."""
        if self.offsets is None:
            return np.arange(self.count, dtype=np.int64) * self.stride
        return self.offsets


@dataclass(frozen=True)
class Selection:
    """The elements that an index selects."""

    base: int  #: position of the first element, without those of `offsets`, bytes
    loops: tuple[Loop, ...]  #: in the order of the file
    shape: tuple[int, ...]  #: of the result
    file_shape: tuple[int, ...]  #: the axes of the result in the order of the file
    axes: tuple[int, ...]  #: where each axis of `file_shape` is in `shape`
    is_scalar: bool  #: the result is one element instead of an array without axes

    def to_file_order(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns `values`, of the shape of the result, with one axis for each loop."""
        values = values.transpose(self.axes)
        return values.reshape([loop.count for loop in self.loops])

    def from_file_order(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns `values`, with one axis for each loop, in the shape of the result."""
        values = values.reshape(self.file_shape)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return values.transpose(inverse)


NOT_AN_INDEX = (
    "only integers, slices (`:`), ellipsis (`...`), numpy.newaxis (`None`) and integer or boolean "
    "arrays are valid indices"
)


def in_bounds(index: int, length: int, axis: int) -> int:
    """Returns an index that is not negative.

    Raises:
        IndexError: there is no such element.
    """
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of bounds for axis {axis} with size {length}")
    return index + length if index < 0 else index


def all_in_bounds(indices: NDArray[Any], length: int, axis: int) -> Offsets:
    """Returns integer indices that are not negative, as :func:`in_bounds`."""
    if indices.dtype != np.int64:
        if indices.dtype == np.uint64 and indices.size and indices.max() >= length:
            in_bounds(int(indices.max()), length, axis)
        indices = indices.astype(np.int64)
    if indices.size:
        lowest, highest = int(indices.min()), int(indices.max())
        if highest >= length or lowest < -length:
            wrong = (indices >= length) | (indices < -length)
            in_bounds(int(indices[wrong].flat[0]), length, axis)
        if lowest < 0:
            indices = np.where(indices < 0, indices + length, indices)
    return indices


def _item(item: Any) -> Any:
    """Returns an element of an index as an `int`, a `slice`, `None`, `...` or an array."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, (bool, np.bool_)):
        return np.asarray(item)
    if not isinstance(item, np.ndarray):
        try:
            return operator.index(item)
        except TypeError:
            pass
        if isinstance(item, (str, bytes, dict, set, float, complex)):
            raise IndexError(NOT_AN_INDEX)
        item = np.asarray(item)
        if item.size == 0:
            item = item.astype(np.intp)
        if item.dtype.kind not in "iub":
            raise IndexError(NOT_AN_INDEX)
        return item
    if item.dtype.kind not in "iub":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    return int(item) if item.ndim == 0 and item.dtype.kind in "iu" else item


def _parts(key: Any, dimensions: int) -> tuple[list[Any], int | None]:
    """Returns the elements of an index for all axes, and where its ellipsis was."""
    items = [_item(item) for item in (key if isinstance(key, tuple) else (key,))]

    def axes_of(item: Any) -> int:
        if item is None or item is Ellipsis:
            return 0
        return item.ndim if isinstance(item, np.ndarray) and item.dtype == np.bool_ else 1

    used = sum(map(axes_of, items))
    if used > dimensions:
        raise IndexError(
            f"too many indices for array: array is {dimensions}-dimensional, "
            f"but {used} were indexed"
        )
    places = [place for place, item in enumerate(items) if isinstance(item, EllipsisType)]
    if len(places) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    whole = [slice(None)] * (dimensions - used)
    place = places[0] if places else len(items)
    parts = items[:place] + whole + items[place + 1 :]
    return parts, places[0] if places else None


def select(
    key: Any, shape: tuple[int, ...], strides: tuple[int, ...], base: int
) -> Selection:
    """Returns what `key` selects of an array, with the rules of numpy.

    Raises:
        IndexError, ValueError, TypeError: as numpy raises them.
    """
    parts, ellipsis = _parts(key, len(shape))
    has_arrays = any(isinstance(part, np.ndarray) for part in parts)
    basic: list[Loop] = []
    arrays: list[tuple[NDArray[Any], int]] = []  # indices and axis of each
    places: list[int] = []  # of arrays among the parts
    place_in_result = 0
    axis = 0
    for number, part in enumerate(parts):
        if part is None:
            basic.append(Loop(1, 0))
            continue
        if isinstance(part, np.ndarray) and part.dtype == np.bool_:
            for offset, length in enumerate(part.shape):
                # As in numpy, a mask without elements has any length.
                if length not in (0, shape[axis + offset]):
                    raise IndexError(
                        "boolean index did not match indexed array along axis "
                        f"{axis + offset}; size of axis is {shape[axis + offset]} but size of "
                        f"corresponding boolean axis is {length}"
                    )
            if part.ndim == 0:
                arrays.append((np.zeros(int(part), np.int64), -1))
            else:
                arrays += [(each, axis + offset) for offset, each in enumerate(part.nonzero())]
            if not places:
                place_in_result = len(basic)
            places.append(number)
            axis += part.ndim
            continue
        length, stride = shape[axis], strides[axis]
        if isinstance(part, slice):
            start, end, step = part.indices(length)
            count = len(range(start, end, step))
            base += start * stride if count else 0
            basic.append(Loop(count, step * stride))
        elif has_arrays:
            if not places:
                place_in_result = len(basic)
            places.append(number)
            if not isinstance(part, np.ndarray):
                part = np.asarray(in_bounds(part, length, axis))
            arrays.append((part, axis))
        else:
            base += in_bounds(part, length, axis) * stride
        axis += 1
    if not has_arrays:
        return _ordered(base, basic, None, 0, (), is_scalar=not basic and ellipsis is None)
    # Arrays with something between them, even an ellipsis for no axis, make the first axes.
    has_gap = places[-1] - places[0] >= len(places)
    if has_gap or (ellipsis is not None and places[0] < ellipsis <= places[-1]):
        place_in_result = 0
    try:
        common = np.broadcast_shapes(*(indices.shape for indices, _ in arrays))
    except ValueError:
        shapes = " ".join(str(indices.shape) for indices, _ in arrays)
        raise IndexError(
            f"shape mismatch: indexing arrays could not be broadcast together with shapes {shapes}"
        ) from None
    offsets = np.zeros(common, np.int64)
    widest = 0
    for indices, axis in arrays:
        # As in numpy, an index that selects nothing is never out of bounds.
        if axis >= 0 and offsets.size:
            offsets += all_in_bounds(indices, shape[axis], axis) * strides[axis]
            widest = max(widest, abs(strides[axis]))
    loop = Loop(offsets.size, widest, offsets.reshape(-1))
    return _ordered(base, basic, loop, place_in_result, common, is_scalar=False)


def _ordered(
    base: int,
    basic: list[Loop],
    arrays: Loop | None,
    place: int,
    common: tuple[int, ...],
    is_scalar: bool,
) -> Selection:
    """Returns a selection with its loops in the order of the file."""
    loops: list[tuple[Loop, tuple[int, ...], tuple[int, ...]]] = []  # with shape and axes
    shape: list[int] = []
    for number in range(len(basic) + 1):
        if arrays is not None and number == place:
            axes = tuple(range(len(shape), len(shape) + len(common)))
            loops.append((arrays, common, axes))
            shape += common
        if number < len(basic):
            loops.append((basic[number], (basic[number].count,), (len(shape),)))
            shape.append(basic[number].count)
    loops.sort(key=lambda entry: -abs(entry[0].stride))
    return Selection(
        base,
        tuple(loop for loop, _, _ in loops),
        tuple(shape),
        tuple(length for _, lengths, _ in loops for length in lengths),
        tuple(axis for _, _, axes in loops for axis in axes),
        is_scalar,
    )


@dataclass(frozen=True)
class _Runs:
    """Loops of which the innermost are merged: `outer` ones, and `count` runs at each step."""

    outer: tuple[Loop, ...]
    count: int
    stride: int
    run: int

    @property
    def positions(self) -> int:
        return math.prod(loop.count for loop in self.outer)

    def positions_from(self, base: int) -> NDArray[np.uint64]:
        total = np.full(1, base, np.int64)
        for loop in self.outer:
            total = (total[:, np.newaxis] + loop.steps()).reshape(-1)
        return total.view(np.uint64)


def _merge(loops: tuple[Loop, ...], item_bytes: int) -> _Runs:
    outer = [loop for loop in loops if loop.count != 1 or loop.offsets is not None]

    def pop(stride: int) -> Loop | None:
        is_next = outer and outer[-1].offsets is None and outer[-1].stride == stride
        return outer.pop() if is_next else None

    run = item_bytes
    while loop := pop(run):
        run *= loop.count
    if not outer or outer[-1].offsets is not None:
        # Counted in elements, so that a call can stop between them.
        return _Runs(tuple(outer), run // item_bytes, item_bytes, item_bytes)
    last = outer.pop()
    count = last.count
    while loop := pop(last.stride * count):
        count *= loop.count
    return _Runs(tuple(outer), count, last.stride, run)


def _parts_of(
    values: NDArray[Any], loops: tuple[Loop, ...], base: int, is_small: Any
) -> Any:
    """Yields parts of `values` with their loops and bases, in order, each small enough."""
    if not loops or is_small(values, loops):
        yield values, loops, base
        return
    outer, rest = loops[0], loops[1:]
    if not is_small(values[:1], (Loop(1, 0), *rest)):
        for step in range(outer.count):
            part, shift = outer.part(step, step + 1)
            shift += int(part.offsets[0]) if part.offsets is not None else 0
            yield from _parts_of(values[step], rest, base + shift, is_small)
        return
    most = 1
    while most * 2 < outer.count:
        part, _ = outer.part(0, most * 2)
        if not is_small(values[: most * 2], (part, *rest)):
            break
        most *= 2
    for start in range(0, outer.count, most):
        end = min(start + most, outer.count)
        part, shift = outer.part(start, end)
        yield values[start:end], (part, *rest), base + shift


def load(
    file: _core.File, values: NDArray[Any], loops: tuple[Loop, ...], base: int
) -> None:
    """Reads the elements of `loops` into `values`, contiguous with one axis for each loop."""
    if values.nbytes == 0:
        return

    def is_small(part: NDArray[Any], loops: tuple[Loop, ...]) -> bool:
        return _merge(loops, values.itemsize).positions <= POSITIONS_MAX

    for part, inner, start in _parts_of(values, loops, base, is_small):
        runs = _merge(inner, values.itemsize)
        positions = runs.positions_from(start)
        file.read_runs(part, positions, runs.count, runs.stride, runs.run)


def store(
    file: _core.File,
    values: NDArray[Any],
    dtype: np.dtype[Any],
    loops: tuple[Loop, ...],
    base: int,
) -> None:
    """Writes `values`, with one axis for each loop, to the elements of `loops`."""
    if values.size == 0 or dtype.itemsize == 0:
        return

    def is_small(part: NDArray[Any], loops: tuple[Loop, ...]) -> bool:
        has_few = _merge(loops, dtype.itemsize).positions <= POSITIONS_MAX
        return has_few and part.size * dtype.itemsize <= _STORE_BYTES_MAX

    for part, inner, start in _parts_of(values, loops, base, is_small):
        if part.dtype != dtype or not part.flags.c_contiguous:
            # Zeros: padding of structures must not show what was in this memory before.
            converted = np.zeros(part.shape, dtype)
            converted[...] = part
            part = converted
        runs = _merge(inner, dtype.itemsize)
        positions = runs.positions_from(start)
        file.write_runs(part, positions, runs.count, runs.stride, runs.run)
