"""The class :class:`Cache`, and the open files behind arrays and file objects."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from . import _core, _process
from ._sizes import format_size, parse_size
from ._stats import Stats, html_table

if TYPE_CHECKING:
    from ._array import Array, Shape
    from ._file import File

#: All caches of this process, by the name that they have in every process.
_caches: weakref.WeakValueDictionary[str, Cache] = weakref.WeakValueDictionary()

#: Least bound of a worker by default, bytes.
_WORKER_MEMORY_MIN = 16 << 20


class Handle:
    """An open file: the compiled one of this process, opened again in each child.

    In a process other than the one that opened it, the file is open for reading only: two caches
    that write the same file would overwrite each other's pages.
    """

    def __init__(self, cache: Cache, path: str, access: _core.Access) -> None:
        self.cache = cache
        self.path = path
        self.may_write = access["write"]
        self._generation = _process.generation
        self._core: _core.File | None = None
        #: What the file shall start with, once everything else is durable.
        self.header: bytes | None = None
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        # Before the call that may be interrupted, so that `__del__` finds all attributes.
        self._core = cache._here().open(path, access)

    def core(self) -> _core.File:
        """Returns the file of this process."""
        if self._generation != _process.generation:
            self._reopen()
        if self._core is None:
            raise ValueError(f"{self.path} is closed")
        return self._core

    def core_to_write(self) -> _core.File:
        """Returns the file of this process, which is noted to have writes."""
        core = self.core()
        if not self.may_write:
            raise ValueError(
                f"{self.path} is read-only here; a file that was opened for writing in another "
                "process, such as the parent of a worker, can only be read"
            )
        _process.written.add(self)
        return core

    def write_back(self) -> None:
        """Passes all writes to the kernel, for readers in other processes."""
        if self._generation == _process.generation and self._core is not None:
            self._core.write_back()
        _process.written.discard(self)

    def sync(self) -> None:
        """Makes all writes durable."""
        core = self.core()
        if self.may_write:
            core.sync()
            self._write_header(core)
            _process.written.discard(self)

    def _write_header(self, core: _core.File) -> None:
        header = self.header
        if header is not None:
            core.write(header, 0)
            core.sync()
            if self.header is header:
                self.header = None

    def prepare_close(self) -> None:
        """Makes the header durable, if there is a new one, with all that it is about."""
        if self._core is not None and self.header is not None:
            self.sync()

    @property
    def is_closed(self) -> bool:
        return self._core is None or self.cache.closed

    def close(self) -> None:
        """Makes all writes durable and closes the file."""
        if self._generation == _process.generation and not self.cache.closed:
            self.prepare_close()
        core, self._core = self._core, None
        if core is not None and self._generation == _process.generation and not self.cache.closed:
            core.close()
        _process.written.discard(self)

    def _reopen(self) -> None:
        with _process.reopening:
            if self._generation == _process.generation:
                return
            if self._core is not None:
                self.may_write = False
                self._core = self.cache._here().open(self.path, READ)
            self._generation = _process.generation

    def __del__(self) -> None:
        # Python prints an error that is raised here.
        if getattr(self, "_core", None) is not None:
            self.close()


READ: _core.Access = {"write": False, "create": False, "create_new": False, "truncate": False}
READ_WRITE: _core.Access = {**READ, "write": True}
#: Creates the file if there is none.
CREATE: _core.Access = {**READ_WRITE, "create": True}
#: Creates the file, or truncates the one that there is.
CREATE_EMPTY: _core.Access = {**CREATE, "truncate": True}
#: Creates the file, and fails if there is one.
CREATE_NEW: _core.Access = {**READ_WRITE, "create_new": True}


class Cache:
    """A cache of pages of files, with a hard bound on its memory.

    >>> import bifolio, numpy as np
    >>> cache = bifolio.Cache("64 MiB")
    >>> array = cache.open_array(path, "w+", dtype="f4", shape=(1000, 16))
    >>> array[10:20] = 1.5
    >>> array[[3, 12, 19]].sum(axis=1)
    array([ 0., 24., 24.], dtype=float32)
    >>> cache.close()

    Args:
        memory: the bound in bytes, or a text such as ``"4 GiB"``: pages and what the cache knows
            of them, together. A quarter of what the machine has and its control groups allow if
            not given. Beside it, each open file takes about 2 KiB.
        worker_memory: the bound in each other process that uses this cache, such as the workers
            of a ``torch.utils.data.DataLoader``: one eighth of `memory` if not given, at least
            16 MiB. Bounds add up over processes; :func:`divide` divides one among them.
        flush_seconds: how long a write may stay in memory only. Those of the last
            `flush_seconds` are lost if the process is killed, unless `flush` was called.

    All methods may be called from several threads. Calls that wait release the GIL.

    Raises:
        ValueError: a bound that is not possible, or that is no size.
        OSError: the system refuses address space or a thread.
    """

    def __init__(
        self,
        memory: SupportsIndex | str | None = None,
        *,
        worker_memory: SupportsIndex | str | None = None,
        flush_seconds: float = 5.0,
    ) -> None:
        bound = _process.allowed_memory() // 4 if memory is None else parse_size(memory)
        for_worker = bound // 8 if worker_memory is None else parse_size(worker_memory)
        if worker_memory is None:
            for_worker = max(for_worker, min(bound, _WORKER_MEMORY_MIN))
        self._start(bound, for_worker, flush_seconds, uuid.uuid4().hex, is_worker=False)

    def _start(
        self, bound: int, worker_memory: int, flush_seconds: float, name: str, is_worker: bool
    ) -> None:
        self._core: _core.Cache | None = None
        self._bound = bound
        self._worker_memory = worker_memory
        self._flush_seconds = flush_seconds
        self._name = name
        self._is_worker = is_worker
        self._is_closed = False
        self._generation = _process.generation
        self._core = _core.Cache(bound, flush_seconds)
        _caches[name] = self
        _close_at_end_of_worker()

    # Access to files.

    def open_array(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        dtype: DTypeLike | None = None,
        shape: Shape | None = None,
        order: str = "C",
    ) -> Array:
        """Opens an array in a ``.npy`` file (versions 1.0 to 3.0).

        Args:
            path: the file.
            mode: ``"r"`` to read, ``"r+"`` also to write, ``"w+"`` to create a file of zeros, or
                to replace one.
            dtype: type of the elements; only for ``"w+"``.
            shape: shape of the array, elements; only for ``"w+"``.
            order: ``"C"``, or ``"F"`` for Fortran order; only for ``"w+"``.

        Returns:
            The array, which stays on the file. Indexing reads.

        Raises:
            ValueError: the file is no array, is shorter than its header says, or contains Python
                objects; an argument is not valid.
            OSError: the file cannot be opened or read.
        """
        from . import _array

        return _array.open_array(self, path, mode, dtype, shape, order)

    def memmap(
        self,
        filename: str | os.PathLike[str],
        dtype: DTypeLike = np.uint8,
        mode: str = "r+",
        offset: int = 0,
        shape: Shape | None = None,
        order: str = "C",
    ) -> Array:
        """Opens an array in a file without a header, with the arguments of :class:`numpy.memmap`.

        Args:
            filename: the file.
            dtype: type of the elements.
            mode: ``"r"``, ``"r+"`` or ``"w+"`` (or ``"readonly"``, ``"readwrite"``, ``"write"``).
                Copy on write (``"c"``) is not supported.
            offset: position of the first element, bytes.
            shape: shape, elements; one axis up to the end of the file if not given. A file that
                is open for writing grows to hold it.
            order: ``"C"`` or ``"F"``.

        Raises:
            ValueError: as :class:`numpy.memmap`; a dtype of Python objects.
            OSError: the file cannot be opened.
        """
        from . import _array

        return _array.memmap(self, filename, dtype, mode, offset, shape, order)

    def open(self, path: str | os.PathLike[str], mode: str = "rb") -> File:
        """Opens a binary file as a raw file object (:class:`io.RawIOBase`).

        Args:
            path: the file.
            mode: a binary mode as :func:`open` has them: ``"rb"``, ``"r+b"``, ``"w+b"``, ``"xb"``,
                ``"ab"`` ..

        Raises:
            ValueError: a mode that is not valid, or a text mode.
            OSError: the file cannot be opened.
        """
        from . import _file

        return _file.File(self, path, mode)

    # The cache itself.

    def stats(self) -> Stats:
        """Returns a snapshot of the counters: a dict, and a table when printed."""
        return Stats(self._here().stats())

    @property
    def memory(self) -> int:
        """The bound in this process, bytes. Assign to change it; a lower bound evicts pages."""
        if self._generation == _process.generation:
            return self._bound
        return self._worker_memory

    @memory.setter
    def memory(self, size: SupportsIndex | str) -> None:
        bound = parse_size(size)
        self._here().set_memory(bound)
        self._bound = bound

    @property
    def worker_memory(self) -> int:
        """The bound in each other process that uses this cache, bytes."""
        return self._worker_memory

    @property
    def closed(self) -> bool:
        """`True` after :meth:`close`."""
        return self._is_closed

    def evict(self) -> int:
        """Drops all pages from memory that have no writes. Returns their number of folios."""
        return self._here().evict_all()

    def close(self) -> None:
        """Makes all writes durable and closes all arrays and files of the cache.

        Raises:
            OSError: something could not be written; the cache is open then, and nothing is lost.
        """
        if self._is_closed:
            return
        if self._generation == _process.generation and self._core is not None:
            for file in list(_process.written):
                if isinstance(file, Handle) and file.cache is self:
                    file.prepare_close()
            self._core.close()
        self._is_closed = True

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self._name, self._worker_memory, self._flush_seconds)
        return restore_cache, settings

    def _here(self) -> _core.Cache:
        """Returns the compiled cache of this process."""
        if self._is_closed:
            raise ValueError("the cache is closed")
        if self._generation != _process.generation:
            with _process.reopening:
                if self._generation != _process.generation:
                    # The old one belongs to the parent. It is dropped, which leaves it alone.
                    self._core = None
                    self._core = _core.Cache(self._worker_memory, self._flush_seconds)
                    self._bound, self._is_worker = self._worker_memory, True
                    self._generation = _process.generation
                    _close_at_end_of_worker()
        if self._core is None:
            raise ValueError("the cache could not be built")
        return self._core

    def _lines(self) -> list[tuple[str, str]]:
        if self._is_closed:
            return [("bound", format_size(self._bound)), ("state", "closed")]
        if self._generation != _process.generation:
            return [("bound", format_size(self._worker_memory)), ("state", "not used here")]
        return self.stats().rows()

    def __repr__(self) -> str:
        lines = dict(self._lines())
        if "state" in lines:
            return f"<bifolio.Cache of {lines['bound']}, {lines['state']}>"
        return (
            f"<bifolio.Cache of {lines['bound']}: {lines['in use']} in use, hits {lines['hits']}>"
        )

    def _repr_html_(self) -> str:
        return html_table([("bifolio.Cache", ""), *self._lines()])


def restore_cache(name: str, worker_memory: int, flush_seconds: float) -> Cache:
    """Returns the cache of that name in this process, for `pickle`."""
    with _restoring:
        cache = _caches.get(name)
        if cache is None or cache.closed:
            cache = Cache.__new__(Cache)
            cache._start(worker_memory, worker_memory, flush_seconds, name, is_worker=True)
        return cache


_restoring = threading.Lock()


def _new_lock() -> None:
    global _restoring
    _restoring = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _close_all() -> None:
    for cache in list(_caches.values()):
        if cache._generation == _process.generation:
            cache.close()


atexit.register(_close_all)


def _close_at_end_of_worker() -> None:
    """Closes caches when a worker of `multiprocessing` ends, which runs no `atexit` functions."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return
    global _noted_generation
    if _noted_generation != _process.generation:
        _noted_generation = _process.generation
        util.Finalize(None, _close_all, exitpriority=0)


_noted_generation = -1
