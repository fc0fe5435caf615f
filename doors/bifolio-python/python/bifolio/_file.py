"""The class :class:`File`: a raw binary file object over the cache."""

from __future__ import annotations

import errno
import io
import operator
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _core
from ._cache import CREATE, CREATE_EMPTY, CREATE_NEW, READ, READ_WRITE, Cache, Handle

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_ACCESS = {"r": READ, "r+": READ_WRITE, "w": CREATE_EMPTY, "x": CREATE_NEW, "a": CREATE}
#: Bytes that `readline` looks at first.
_LINE_BYTES = 256


class File(io.RawIOBase):
    """A raw binary file: :class:`io.RawIOBase` over a cache. Made by :meth:`Cache.open`.

    `read` and `readinto` return all bytes that were asked for unless the file ends. `write` writes
    all bytes. After `flush` they are in the kernel, where other processes see them and the death of
    this one cannot lose them; after `sync` or `close` they are durable. The object has a position,
    so threads that share it need a lock; `pread` and `pwrite` need none.
    """

    name: str = ""
    mode: str = ""
    # Python finalizes an object whose `__init__` has failed, too.
    _handle: Handle | None = None

    def __init__(self, cache: Cache, path: str | os.PathLike[str], mode: str = "rb") -> None:
        kind = mode.replace("b", "", 1).replace("+", "", 1)
        if "b" not in mode:
            raise ValueError(f"mode {mode!r} is a text mode; wrap the file in io.TextIOWrapper")
        if kind not in ("r", "w", "x", "a"):
            raise ValueError(f"invalid mode: {mode!r}")
        is_updated = "+" in mode
        access = _ACCESS["r+" if kind == "r" and is_updated else kind]
        self.name = os.path.abspath(os.fsdecode(os.fspath(path)))
        self.mode = f"{kind}b+" if is_updated else f"{kind}b"
        self._reads = kind == "r" or is_updated
        self._writes = kind != "r" or is_updated
        self._appends = kind == "a"
        self._start(Handle(cache, self.name, access))
        if self._appends:
            self._position = self._open().core().len()

    def _start(self, handle: Handle) -> None:
        self._handle = handle
        if self._appends and handle.may_write and type(self).write is File.write:
            # Code of Python after the append could be interrupted, and a wrapper would append again.
            self.write = handle.core().write_at_end  # type: ignore[method-assign]

    @property
    def _position(self) -> int:
        return self._open().position

    @_position.setter
    def _position(self, position: int) -> None:
        self._open().position = position

    @property
    def cache(self) -> Cache:
        """The cache."""
        return self._open().cache

    #: `True` after :meth:`close`, of the file or its cache. Not code of Python: an interrupt there
    #: would make a wrapper say that the file is closed.
    closed = _core.Closed()

    # What the object can do.

    def readable(self) -> bool:
        self._check_open()
        return self._reads

    def writable(self) -> bool:
        self._check_open()
        return self._writes

    def seekable(self) -> bool:
        self._check_open()
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation(
            "a file of a cache has no descriptor: a library that used one would not see writes in "
            "the cache, and would fill the kernel's memory instead"
        )

    def isatty(self) -> bool:
        self._check_open()
        return False

    def _check_open(self) -> None:
        self._open()

    def _open(self) -> Handle:
        handle = self._handle
        if handle is None or handle.is_closed:
            raise ValueError("I/O operation on closed file")
        return handle

    # Reads.

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = self.pread_into(buffer, self._position)
        self._position += count
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        data = self.pread(size, self._position)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        parts = []
        # More than once only if the file grows meanwhile.
        while left := max(self._reader().len() - self._position, 0):
            parts.append(self.read(left))
        return b"".join(parts)

    def readline(self, size: int | None = -1, /) -> bytes:
        limit = -1 if size is None else size
        line = b""
        step = _LINE_BYTES
        while limit < 0 or len(line) < limit:
            wanted = step if limit < 0 else min(step, limit - len(line))
            part = self.pread(wanted, self._position + len(line))
            end = part.find(b"\n") + 1
            line += part[: end or None]
            if end or len(part) < wanted:
                break
            step *= 2
        self._position += len(line)
        return line

    def __iter__(self) -> Iterator[bytes]:
        """Iterates over the lines that follow the position.

        A chunk of the file is in memory at a time: the loop does not see what is written to it
        meanwhile.
        """
        self._check_open()
        return _core.Lines(self)

    def pread(self, size: int, position: int) -> bytes:
        """Returns up to `size` bytes at `position`, fewer only at the end of the file."""
        return self._reader().read(max(operator.index(size), 0), position)

    def pread_into(self, buffer: WriteableBuffer, position: int) -> int:
        """Reads at `position` into `buffer`. Returns the number of bytes."""
        return self._reader().read_into(buffer, position)

    def _reader(self) -> _core.File:
        handle = self._open()
        if not self._reads:
            raise io.UnsupportedOperation("not readable")
        return handle.core()

    # Writes.

    def write(self, data: ReadableBuffer, /) -> int:
        file = self._writer()
        if self._appends:
            return file.write_at_end(data)
        length = memoryview(data).nbytes
        position = self._position
        # An interrupt after the first call leaves the position: what is written again is the same.
        file.write(data, position)
        file.position = position + length
        return length

    def pwrite(self, data: ReadableBuffer, position: int) -> int:
        """Writes all of `data` at `position`. Returns its length in bytes."""
        self._writer().write(data, position)
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        size = self._position if size is None else operator.index(size)
        if size < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._writer().set_len(size)
        return size

    def flush(self) -> None:
        """Passes all writes to the kernel, and waits for it."""
        handle = self._handle
        if handle is not None and self._writes:
            handle.write_back()

    def sync(self) -> None:
        """Makes all writes durable."""
        self._open().sync()

    def _writer(self) -> _core.File:
        handle = self._open()
        if not self._writes:
            raise io.UnsupportedOperation("not writable")
        return handle.core_to_write()

    # Position, end.

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        handle = self._open()
        offset = operator.index(offset)
        if whence == os.SEEK_SET:
            position = offset
        elif whence == os.SEEK_CUR:
            position = self._position + offset
        elif whence == os.SEEK_END:
            position = handle.core().len() + offset
        else:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        if not 0 <= position < 1 << 63:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._position = position
        return position

    def tell(self) -> int:
        self._check_open()
        return self._position

    def close(self) -> None:
        """Makes all writes durable and closes the file."""
        handle = self._handle
        try:
            # One compiled call, after which the file is closed: an interrupt comes before or after.
            if handle is not None:
                handle.close()
        finally:
            super().close()

    def __del__(self) -> None:
        # Python prints an error that is raised here. Before 3.13, that of `io.RawIOBase` hides it.
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        handle = self._open()
        self.flush()
        return {
            "cache": handle.cache,
            "name": self.name,
            "mode": self.mode,
            "position": self._position,
            "may_write": handle.may_write,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.mode = state["name"], state["mode"]
        kind, is_updated = self.mode[0], "+" in self.mode
        self._reads = kind == "r" or is_updated
        self._writes = kind != "r" or is_updated
        self._appends = kind == "a"
        may_write = state["may_write"] and not state["cache"]._is_worker
        self._start(Handle(state["cache"], self.name, READ_WRITE if may_write else READ))
        self._position = state["position"]

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<bifolio.File {self.name!r} mode {self.mode!r}{state}>"
