"""The header of a ``.npy`` file, versions 1.0 to 3.0."""

from __future__ import annotations

import ast
import io
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

if TYPE_CHECKING:
    from . import _core

#: Longest header that is read: a file that says more is no array of ours.
_HEADER_BYTES_MAX = 1 << 20
#: Digits for which a new header leaves room, so that rows can be appended.
_GROWTH_DIGITS = 21
#: Length of a new header, bytes: rows of whole pages start at pages, and none is copied in two
#: parts. Some versions of numpy refuse a header of more than 10,000 bytes.
_HEADER_BYTES_NEW = 4096
#: Bytes that are read first: enough for most headers.
_HEADER_BYTES_FIRST = 4096


@dataclass(frozen=True)
class Header:
    """What a header says, and where the data starts."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    version: tuple[int, int]
    length: int  #: bytes of the header with its magic number: the position of the data

    def encode(self) -> bytes:
        """Returns the header as it is in the file."""
        before, after, length = self.parts()
        rows = b"%d" % self.shape[0] if self.shape else b""
        return before + rows + after + b" " * (length - len(before + rows + after) - 1) + b"\n"

    def parts(self) -> tuple[bytes, bytes, int]:
        """Returns what is before and after the number of rows, and the length of the header."""
        start, sized = npy.magic(*self.version), "<H" if self.version == (1, 0) else "<I"
        start += struct.pack(sized, self.length - len(start) - struct.calcsize(sized))
        encoding = "utf-8" if self.version >= (3, 0) else "latin1"
        text = _text(self.dtype, self.shape, self.fortran_order)
        before, shape = text.rsplit("(", 1)
        after = shape[len(str(self.shape[0])) :] if self.shape else shape
        return start + f"{before}(".encode(encoding), after.encode(encoding), self.length


def _text(dtype: np.dtype[Any], shape: tuple[int, ...], fortran_order: bool) -> str:
    descr = npy.dtype_to_descr(dtype)
    shape = tuple(int(length) for length in shape)
    return f"{{'descr': {descr!r}, 'fortran_order': {fortran_order!r}, 'shape': {shape!r}, }}"


def new(dtype: np.dtype[Any], shape: tuple[int, ...], fortran_order: bool) -> Header:
    """Returns the header of a new file, with room for appended rows."""
    text = _text(dtype, shape, fortran_order)
    room = len(text.encode("utf-8")) + _GROWTH_DIGITS + 1 + 12
    length = max(-(-room // 64) * 64, _HEADER_BYTES_NEW)
    version = (1, 0) if length < 1 << 16 else (2, 0)
    try:
        text.encode("latin1")
    except UnicodeEncodeError:
        version = (3, 0)
    return Header(dtype, shape, fortran_order, version, length)


def read(file: _core.File) -> Header:
    """Reads the header at the start of `file`.

    Raises:
        ValueError: the file is no array, or one of Python objects.
    """
    start = io.BytesIO(file.read(_HEADER_BYTES_FIRST, 0))
    version = npy.read_magic(start)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not known")
    sized = "<H" if version == (1, 0) else "<I"
    (length,) = struct.unpack(sized, _exactly(start.read(struct.calcsize(sized)), sized))
    if length > _HEADER_BYTES_MAX:
        raise ValueError(f"the header would be {length} bytes long")
    body = file.read(length, start.tell())
    if len(body) < length:
        raise ValueError("the file ends inside of its header")
    try:
        text = body.decode("utf-8" if version >= (3, 0) else "latin1")
        fields = _fields(text.strip(), version)
        shape, descr = fields["shape"], fields["descr"]
        fortran_order = fields["fortran_order"]
        dtype = npy.descr_to_dtype(descr)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or type(fortran_order) is not bool or set(fields) != npy.EXPECTED_KEYS:
        raise ValueError(f"the header is not valid: {text.strip()[:200]!r}")
    return Header(dtype, shape, fortran_order, version, start.tell() + length)


def _fields(text: str, version: tuple[int, int]) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:
        if version >= (3, 0):
            raise
        # Python 2 wrote long integers: (10L, 3L).
        return ast.literal_eval(re.sub(r"\b([0-9]+)L\b", r"\1", text))


def _exactly(data: bytes, sized: str) -> bytes:
    if len(data) < struct.calcsize(sized):
        raise ValueError("the file ends inside of its header")
    return data
