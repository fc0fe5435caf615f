"""The class :class:`Cache`, and the open files behind arrays and file objects."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import uuid
import warnings
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

#: The caches that objects from other processes were restored with last. A task of a pool drops its
#: arguments when it ends: without this the cache would end with each task, and its pages with it.
_restored: dict[str, Cache] = {}
#: How many of them: a program that makes a cache for each call does not keep them all.
_RESTORED_MAX = 4

#: Least bound of a worker by default, bytes.
_WORKER_MEMORY_MIN = 16 << 20
#: Bounds that a cache can have, bytes.
_MEMORY_MIN, _MEMORY_MAX = 256 << 10, 4 << 40
#: Ages of writes that a cache can have, seconds.
_FLUSH_SECONDS_MIN, _FLUSH_SECONDS_MAX = 0.001, 3600


class Handle:
    """An open file: the compiled one of this process, opened again in each child.

    In a process other than the one that opened it, the file is open for reading only: two caches
    that write the same file would overwrite each other's pages. What must still reach the file is
    state of the compiled file, which closes itself with its last reference.
    """

    _process = _process.Process

    def __init__(self, cache: Cache, path: str, access: _core.Access) -> None:
        self._core: _core.File | None = None
        self.cache = cache
        self.path = path
        self.may_write = access["write"]
        self._generation = self._process.generation
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._core = cache._here().open(path, access)

    def core(self) -> _core.File:
        """Returns the file of this process."""
        if self._generation != self._process.generation:
            self._reopen()
        if self._core is None:
            raise ValueError(f"{self.path} is closed")
        return self._core

    def core_to_write(self) -> _core.File:
        """Returns the file of this process, if it may be written."""
        core = self.core()
        if not self.may_write:
            raise ValueError(
                f"{self.path} is read-only here; a file that was opened for writing in another "
                "process, such as the parent of a worker, can only be read"
            )
        return core

    @property
    def position(self) -> int:
        """The position of a file object, bytes."""
        return 0 if self._core is None else self._core.position

    @position.setter
    def position(self, position: int) -> None:
        if self._core is not None:
            self._core.position = position

    def write_back(self) -> None:
        """Passes all writes to the kernel, for readers in other processes."""
        core = self._core
        is_here = self._generation == self._process.generation
        if is_here and core is not None and not core.closed:
            core.write_back()

    def sync(self) -> None:
        """Makes all writes durable, then the header that counts the rows among them."""
        core = self.core()
        if self.may_write:
            core.sync()

    @property
    def is_closed(self) -> bool:
        return self._core is None or self._core.closed

    def close(self) -> None:
        """Makes all writes durable and closes the file."""
        if self._core is not None:
            self._core.close()

    def _reopen(self) -> None:
        with self._process.reopening:
            if self._generation == self._process.generation:
                return
            old = self._core
            if old is not None and not old.closed:
                core = self.cache._here().open(self.path, READ)
                if not core.is_same_file(old):
                    raise OSError(
                        errno.ESTALE, "the file was replaced since it was opened", self.path
                    )
                core.position = old.position
                self.may_write = False
                self._core = core
            self._generation = self._process.generation


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
            not given, and a 32nd in a worker. Beside it, each open file takes about 2 KiB.
        worker_memory: the bound in each other process that uses this cache, such as the workers
            of a ``torch.utils.data.DataLoader``: one eighth of `memory` if not given, at least
            16 MiB. Bounds add up over processes; :func:`divide` divides one among them.
        flush_seconds: how long a write may stay in memory only. Those of the last
            `flush_seconds` are lost if the process is killed, unless `flush` was called.

    All methods may be called from several threads. Calls that wait release the GIL. A file is open
    for writing in one cache of a process at a time.

    Raises:
        ValueError: a bound that is not possible, or that is no size.
        OSError: the system refuses address space or a thread.
    """

    _process = _process.Process

    def __init__(
        self,
        memory: SupportsIndex | str | None = None,
        *,
        worker_memory: SupportsIndex | str | None = None,
        flush_seconds: float = 5.0,
    ) -> None:
        allowed = _process.allowed_memory()
        # Of workers that each build a cache there are many.
        share = allowed // 32 if _process.is_worker() else allowed // 4
        bound = share if memory is None else _checked("memory", memory)
        if bound > allowed:
            warnings.warn(
                f"a bound of {format_size(bound)} is more than this process may use, "
                f"{format_size(allowed)}",
                RuntimeWarning,
                stacklevel=2,
            )
        for_worker = bound // 8 if worker_memory is None else _checked("worker_memory", worker_memory)
        if worker_memory is None:
            for_worker = max(for_worker, min(bound, _WORKER_MEMORY_MIN))
        seconds = float(flush_seconds)
        if not _FLUSH_SECONDS_MIN <= seconds <= _FLUSH_SECONDS_MAX:
            raise ValueError(
                f"flush_seconds is {flush_seconds}, not from {_FLUSH_SECONDS_MIN} to "
                f"{_FLUSH_SECONDS_MAX} (an hour)"
            )
        self._start(bound, for_worker, seconds, uuid.uuid4().hex, is_worker=False)

    def _start(
        self, bound: int, worker_memory: int, flush_seconds: float, name: str, is_worker: bool
    ) -> None:
        self._core: _core.Cache | None = None
        self._bound = bound
        self._worker_memory = worker_memory
        self._flush_seconds = flush_seconds
        self._name = name
        self._is_worker = is_worker
        #: Most bytes of a result that a slice reads: the bound of the first process.
        self._result_bytes_max = bound
        self._generation = self._process.generation
        self._core = _core.Cache(bound, flush_seconds)
        _caches[name] = self
        _sync_at_end_of_worker()

    # Access to files.

    def open_array(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        dtype: DTypeLike | None = None,
        shape: Shape | None = None,
        order: str = "C",
        repair: bool = False,
    ) -> Array:
        """Opens an array in a ``.npy`` file (versions 1.0 to 3.0).

        Args:
            path: the file.
            mode: ``"r"`` to read, ``"r+"`` also to write, ``"w+"`` to create a file of zeros, or
                to replace one.
            dtype: type of the elements; only for ``"w+"``.
            shape: shape of the array, elements; only for ``"w+"``.
            order: ``"C"``, or ``"F"`` for Fortran order; only for ``"w+"``.
            repair: makes the file end with the rows that its header counts, as :meth:`Array.append`
                does, even if another array follows them; only for ``"r+"``. A program that died
                between an append and its flush leaves rows that no header counts.

        Returns:
            The array, which stays on the file. Indexing reads.

        Raises:
            ValueError: the file is no array, is shorter than its header says, or contains Python
                objects; an argument is not valid.
            OSError: the file cannot be opened or read.
        """
        from . import _array

        return _array.open_array(self, path, mode, dtype, shape, order, repair)

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
        if self._generation == self._process.generation:
            return self._bound
        return self._worker_memory

    @memory.setter
    def memory(self, size: SupportsIndex | str) -> None:
        bound = _checked("memory", size)
        self._here().set_memory(bound)
        self._bound = self._result_bytes_max = bound

    @property
    def worker_memory(self) -> int:
        """The bound in each other process that uses this cache, bytes."""
        return self._worker_memory

    @property
    def closed(self) -> bool:
        """`True` after :meth:`close`."""
        return self._core is None or self._core.closed

    def evict(self) -> int:
        """Drops all pages from memory that have no writes. Returns their number of folios."""
        return self._here().evict_all()

    def save_hot(self, path: str | os.PathLike[str]) -> int:
        """Writes a list of the pages in memory, the hottest first, for :meth:`restore_hot` of a later
        process.

        The list has positions, not values, and takes about 3 bytes for each run of pages. It
        replaces the list at `path` at once. Call this before the arrays are closed.

        Args:
            path: the list; a file that is something else is not replaced.

        Returns:
            The bytes of the listed pages.

        Raises:
            OSError: the list cannot be written; the old one is still there.
            ValueError: the file at `path` is no list.
        """
        return self._here().save_hot(os.fspath(path))

    def restore_hot(self, path: str | os.PathLike[str], *, wait: bool = False) -> int:
        """Starts to read the pages of a list in the background: those of files that are open now,
        and of others when they are opened.

        Only free memory is filled. Values are those that the files have now, whatever has become
        of the list and of the files since :meth:`save_hot`.

        Args:
            path: a list that :meth:`save_hot` has written.
            wait: returns when the pages of the files that are open now are read.

        Returns:
            The bytes read so far.

        Raises:
            OSError: the list cannot be read.
            ValueError: the file is no list.
        """
        return self._here().restore_hot(os.fspath(path), wait)

    def close(self) -> None:
        """Makes all writes durable and closes all arrays and files of the cache.

        Raises:
            OSError: something could not be written; the cache is open then, and nothing is lost.
        """
        core = self._core
        if core is not None and not core.closed:
            if self._generation != self._process.generation:
                core = self._here()
            core.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._name, self._worker_memory, self._flush_seconds, self._result_bytes_max
        return restore_cache, settings

    def _here(self) -> _core.Cache:
        """Returns the compiled cache of this process."""
        core = self._core
        if core is None or core.closed:
            raise ValueError("the cache is closed")
        if self._generation == self._process.generation:
            return core
        with self._process.reopening:
            if self._generation != self._process.generation:
                # The old one belongs to the parent. It is dropped, which leaves it alone.
                core = _core.Cache(self._worker_memory, self._flush_seconds, self._core)
                _sync_at_end_of_worker()
                self._core = core
                self._bound, self._is_worker = self._worker_memory, True
                self._generation = self._process.generation
        assert self._core is not None
        return self._core

    def _lines(self) -> list[tuple[str, str]]:
        if self.closed:
            return [("bound", format_size(self._bound)), ("state", "closed")]
        if self._generation != self._process.generation:
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


def restore_cache(
    name: str, worker_memory: int, flush_seconds: float, result_bytes_max: int
) -> Cache:
    """Returns the cache of that name in this process, for `pickle`."""
    with _restoring:
        cache = _caches.get(name)
        if cache is None or cache.closed:
            cache = Cache.__new__(Cache)
            cache._start(worker_memory, worker_memory, flush_seconds, name, is_worker=True)
            cache._result_bytes_max = result_bytes_max
        elif not cache._is_worker and cache._generation == Cache._process.generation:
            # A copy beside the original, which keeps it as long as the program wants.
            return cache
        # The one that was used last is last.
        _restored.pop(name, None)
        _restored[name] = cache
        while len(_restored) > _RESTORED_MAX:
            del _restored[next(iter(_restored))]
        return cache


_restoring = threading.Lock()


def _new_lock() -> None:
    global _restoring
    _restoring = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _sync_all() -> None:
    """Makes everything durable, and passes each later write on: objects are finalized after this,
    and wrappers such as `io.BufferedWriter` write then. Each file by itself: all are tried."""
    _core.write_through()
    errors: list[Exception] = []
    for cache in list(_caches.values()):
        core = cache._core
        if core is not None and cache._generation == _process.Process.generation:
            errors += core.sync() if not core.closed else []
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("files that could not be written", errors)


atexit.register(_sync_all)


def _sync_at_end_of_worker() -> None:
    """Syncs caches when a worker of `multiprocessing` ends, which runs no `atexit` functions."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return
    global _noted_generation
    if _noted_generation != _process.Process.generation:
        _noted_generation = _process.Process.generation
        util.Finalize(None, _sync_all, exitpriority=0)


_noted_generation = -1


def _checked(name: str, size: SupportsIndex | str) -> int:
    """Returns a bound in bytes.

    Raises:
        ValueError: no cache can have it.
    """
    bound = parse_size(size)
    if not _MEMORY_MIN <= bound <= _MEMORY_MAX:
        raise ValueError(f"{name}: {size!r} is not from 256 KiB to 4 TiB")
    return bound
