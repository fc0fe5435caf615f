"""A file system for `fsspec`: local files, read and written through a cache.

What takes a file system or a URL of `fsspec` reads through a cache then, within its bound: pandas,
`pyarrow.dataset`, zarr, dask, xarray.

>>> import fsspec, pandas                                                    # doctest: +SKIP
>>> pandas.read_csv("bifolio:///data/table.csv")                             # doctest: +SKIP
>>> files = bifolio.fsspec.FileSystem(bifolio.Cache("1 GiB"))                # doctest: +SKIP
>>> pyarrow.dataset.dataset("/data/parts", filesystem=files)                 # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from ._cache import Cache
from ._file import File

#: Age below which a change may be followed by another with the same time: several ticks of the
#: clock by which kernels stamp files.
_UNSETTLED_NS = 20_000_000

#: Device, inode, size, and times of the last changes: what a change by anybody changes.
_Stamp = tuple[int, int, int, int, int]

_log = logging.getLogger(__name__)
_default: Cache | None = None
_lock = threading.Lock()


def default_cache() -> Cache:
    """Returns the cache of file systems that are made without one, as by a URL: ``Cache()``."""
    global _default
    with _lock:
        if _default is None or _default.closed:
            _default = Cache()
        return _default


class _Kept(NamedTuple):
    """A file that stays open for its pages, and its stamp from before the first was read."""

    file: File
    stamp: _Stamp | None


def _stamp(path: str) -> _Stamp | None:
    """Returns what the next change of a file will change; None if that is not certain.

    Taken before pages are read: a later change of the file then shows in a later stamp.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    if time.time_ns() - changed < _UNSETTLED_NS:
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _close(dropped: Iterable[_Kept]) -> None:
    """Closes files that are no longer kept.

    What a writer has left dirty it was told of: the caller here may be opening another file.
    """
    for kept in dropped:
        try:
            kept.file.close()
        except OSError as problem:
            _log.warning("a kept file: %s", problem)


class FileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files through a cache, for the protocol ``bifolio://``.

    Libraries open a file anew for each part that they read. The pages of the last files that were
    read stay in memory, within the bound, although their readers have closed them. A file
    that another program has changed since, by its size or its times, is read anew once no reader
    has it open; readers beside each other share pages, and may not see the change.

    Args:
        cache: the cache; one for all file systems that are made without if not given.
        auto_mkdir: creates the directory of a file that is opened for writing.
        kept_files: files that stay open after their last reader, so that their pages stay; each
            takes two descriptors.
    """

    protocol = ("bifolio",)
    #: No library takes the path and opens the file itself.
    local_file = False
    #: Two caches are never taken for the same.
    cachable = False

    def __init__(
        self,
        cache: Cache | None = None,
        auto_mkdir: bool = False,
        kept_files: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(auto_mkdir=auto_mkdir, **options)
        self._cache = cache
        self._kept_files = kept_files
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @property
    def fsid(self) -> str:
        return "bifolio"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str) and path.startswith("bifolio://"):
            path = path.removeprefix("bifolio://")
        return super()._strip_protocol(path)

    def unstrip_protocol(self, name: str) -> str:
        return f"bifolio://{self._strip_protocol(name)}"

    def _open(self, path: Any, mode: str = "rb", block_size: Any = None, **options: Any) -> File:
        path = self._strip_protocol(path)
        if self.auto_mkdir and mode[:1] in ("w", "x", "a"):
            self.makedirs(self._parent(path), exist_ok=True)
        cache = self._cache or default_cache()
        if mode != "rb":
            return cache.open(path, mode)
        stamp = _stamp(path)
        if self._is_kept(path, stamp):
            return cache.open(path, mode)
        file = cache.open(path, mode)
        self._keep(path, _Kept(cache.open(path, mode), stamp))
        return file

    def rm_file(self, path: Any) -> None:
        super().rm_file(path)
        self._drop_removed()

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        super().rm(path, recursive=recursive, maxdepth=maxdepth)
        self._drop_removed()

    def mv(self, path1: Any, path2: Any, recursive: bool = True, **options: Any) -> None:
        super().mv(path1, path2, recursive=recursive, **options)
        self._drop_removed()
        self._drop(self._strip_protocol(path2))

    def _is_kept(self, path: str, stamp: _Stamp | None) -> bool:
        """Returns if the pages of a file are in memory and current; drops others."""
        with _lock:
            kept = self._kept.get(path)
            if kept is None:
                return False
            if stamp is not None and kept.stamp == stamp and not kept.file.closed:
                self._kept.move_to_end(path)
                return True
            del self._kept[path]
        _close([kept])
        return False

    def _keep(self, path: str, kept: _Kept) -> None:
        with _lock:
            # Another thread may have opened the file since.
            dropped = [self._kept.pop(path)] if path in self._kept else []
            self._kept[path] = kept
            if len(self._kept) > self._kept_files:
                dropped.append(self._kept.popitem(last=False)[1])
        _close(dropped)

    def _drop(self, path: str) -> None:
        """Closes the kept file of a path that has been replaced, so that its room is free."""
        with _lock:
            kept = self._kept.pop(path, None)
        _close([kept] if kept else [])

    def _drop_all(self) -> None:
        """Closes all kept files."""
        with _lock:
            dropped = list(self._kept.values())
            self._kept.clear()
        _close(dropped)

    def _drop_removed(self) -> None:
        """Closes kept files whose names are gone, so that their room on the disk is free."""
        with _lock:
            gone = [path for path in self._kept if not os.path.lexists(path)]
            dropped = [self._kept.pop(path) for path in gone]
        _close(dropped)


__all__ = ["FileSystem", "default_cache"]
