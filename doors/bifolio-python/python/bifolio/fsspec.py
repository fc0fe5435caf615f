"""A file system for `fsspec`: local files, read and written through a cache.

What takes a file system or a URL of `fsspec` reads through a cache then, within its bound: pandas,
`pyarrow.dataset`, zarr, dask, xarray.

>>> import fsspec, pandas                                                    # doctest: +SKIP
>>> pandas.read_csv("bifolio:///data/table.csv")                             # doctest: +SKIP
>>> files = bifolio.fsspec.FileSystem(bifolio.Cache("1 GiB"))                # doctest: +SKIP
>>> pyarrow.dataset.dataset("/data/parts", filesystem=files)                 # doctest: +SKIP
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from ._cache import Cache
from ._file import File

#: Files that stay open after their last reader, so that their pages stay in memory.
_KEPT_FILES = 64

_default: Cache | None = None
_lock = threading.Lock()


def default_cache() -> Cache:
    """Returns the cache of file systems that are made without one, as by a URL: ``Cache()``."""
    global _default
    with _lock:
        if _default is None or _default.closed:
            _default = Cache()
        return _default


class FileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files through a cache, for the protocol ``bifolio://``.

    Libraries open a file anew for each part that they read. The pages of the last 64 files that
    were read stay in memory, within the bound, although their readers have closed them.

    Args:
        cache: the cache; one for all file systems that are made without if not given.
        auto_mkdir: creates the directory of a file that is opened for writing.
    """

    protocol = ("bifolio",)
    #: No library takes the path and opens the file itself.
    local_file = False
    #: Two caches are never taken for the same.
    cachable = False

    def __init__(self, cache: Cache | None = None, auto_mkdir: bool = False, **options: Any) -> None:
        super().__init__(auto_mkdir=auto_mkdir, **options)
        self._cache = cache
        self._kept: OrderedDict[str, File] = OrderedDict()

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
        file = cache.open(path, mode)
        if mode == "rb":
            self._keep(path, cache.open(path, mode))
        return file

    def _keep(self, path: str, file: File) -> None:
        with _lock:
            # A file that has replaced another at this path is the one to keep.
            dropped = [self._kept.pop(path, None)]
            self._kept[path] = file
            if len(self._kept) > _KEPT_FILES:
                dropped.append(self._kept.popitem(last=False)[1])
        for each in dropped:
            if each is not None:
                each.close()


__all__ = ["FileSystem", "default_cache"]
