"""The header of a ``.npy`` file, versions 1.0 to 3.0."""

from __future__ import annotations

import ast
import struct
from dataclasses import dataclass
from io import RawIOBase
from typing import Any

import numpy as np
from numpy.lib import format as npy

#: Longest header that is read: a file that says more is no array of ours.
_HEADER_BYTES_MAX = 1 << 20
#: Digits for which a new header leaves room, so that rows can be appended.
_GROWTH_DIGITS = 21


@dataclass(frozen=True)
class Header:
    """What a header says, and where the data starts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    version: tuple[int, int]
    length: int  #: bytes of the header with its magic number: the position of the data

    def encode(self, shape: tuple[int, ...]) -> bytes:
        """Returns a header of the same length for another shape.

        Raises:
            ValueError: the header has no room for that many digits.
        """
        text = _text(self.dtype, shape, self.fortran_order)
        head = _head(self.version, text, self.length)
        if head is None:
            raise ValueError(
                f"the header of the file has no room for the shape {shape}; "
                "write the array with numpy 1.23 or later, whose headers have"
            )
        return head


def _text(dtype: np.dtype[Any], shape: tuple[int, ...], fortran_order: bool) -> str:
    descr = npy.dtype_to_descr(dtype)
    shape = tuple(int(length) for length in shape)
    return f"{{'descr': {descr!r}, 'fortran_order': {fortran_order!r}, 'shape': {shape!r}, }}"


def _head(version: tuple[int, int], text: str, length: int) -> bytes | None:
    body = text.encode("utf-8" if version >= (3, 0) else "latin1")
    sized = "<H" if version == (1, 0) else "<I"
    start = npy.magic(*version) + struct.pack(sized, length - 8 - struct.calcsize(sized))
    padding = length - len(start) - len(body) - 1
    return start + body + b" " * padding + b"\n" if padding >= 0 else None


def new(dtype: np.dtype[Any], shape: tuple[int, ...], fortran_order: bool) -> Header:
    """Returns the header of a new file, with room for appended rows."""
    text = _text(dtype, shape, fortran_order)
    room = len(text.encode("utf-8")) + _GROWTH_DIGITS + 1 + 12
    length = -(-room // 64) * 64
    version = (1, 0) if length < 1 << 16 else (2, 0)
    try:
        text.encode("latin1")
    except UnicodeEncodeError:
        version = (3, 0)
    return Header(dtype, shape, fortran_order, version, length)


def read(file: RawIOBase) -> Header:
    """Reads the header at the start of `file`.

    Raises:
        ValueError: the file is no array, or one of Python objects.
    """
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not known")
    sized = "<H" if version == (1, 0) else "<I"
    (length,) = struct.unpack(sized, _exactly(file, struct.calcsize(sized)))
    if length > _HEADER_BYTES_MAX:
        raise ValueError(f"the header would be {length} bytes long")
    body = _exactly(file, length)
    try:
        text = body.decode("utf-8" if version >= (3, 0) else "latin1")
        fields = ast.literal_eval(text.strip())
        shape, descr = fields["shape"], fields["descr"]
        fortran_order = fields["fortran_order"]
        dtype = npy.descr_to_dtype(descr)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or type(fortran_order) is not bool or set(fields) != npy.EXPECTED_KEYS:
        raise ValueError(f"the header is not valid: {text.strip()[:200]!r}")
    return Header(dtype, shape, fortran_order, version, file.tell())


def _exactly(file: RawIOBase, length: int) -> bytes:
    read = file.read(length)
    if read is None or len(read) < length:
        raise ValueError("the file ends inside of its header")
    return read
