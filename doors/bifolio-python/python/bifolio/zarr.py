"""A store for zarr 3: arrays in a directory, whose chunks are read through a cache.

>>> import zarr                                                              # doctest: +SKIP
>>> store = bifolio.zarr.Store("era5.zarr", cache=bifolio.Cache("4 GiB"))    # doctest: +SKIP
>>> array = zarr.open_array(store, mode="r")                                 # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype
from zarr.storage import LocalStore

from ._cache import Cache
from .fsspec import FileSystem


class Store(LocalStore):
    """A directory of arrays, as zarr's ``LocalStore``, with reads through a cache.

    Chunks that were read stay in memory, within the bound of the cache, also those that are read by
    part (shards). Writes, listings and deletions are those of ``LocalStore``; a chunk that was
    written since, by any program, is read anew. One that this store replaces or deletes takes no
    room on the disk from then on; another program's takes it until it is read again, or until
    `kept_files` others were read, or until :meth:`close`.

    Args:
        root: the directory.
        read_only: refuses writes.
        cache: the cache; one for all stores and file systems that are made without if not given.
        kept_files: number of chunks whose pages stay; each takes two descriptors.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        read_only: bool = False,
        cache: Cache | None = None,
        kept_files: int = 256,
    ) -> None:
        super().__init__(root, read_only=read_only)
        self._cache = cache
        self._kept_files = kept_files
        self._files = FileSystem(cache, kept_files=kept_files)

    def with_read_only(self, read_only: bool = False) -> Self:
        return type(self)(
            self.root, read_only=read_only, cache=self._cache, kept_files=self._kept_files
        )

    def __repr__(self) -> str:
        return f"bifolio.zarr.Store({str(self.root)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and (self.root, self._cache) == (other.root, other._cache)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        try:
            return self._read(key, prototype or default_buffer_prototype(), byte_range)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if not self._is_open:
            await self._open()
        get: Any = self.get_sync
        found: Buffer | None = await asyncio.to_thread(
            get, key, prototype=prototype, byte_range=byte_range
        )
        return found

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        gets = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*gets))

    # What replaces or deletes chunks: those that are kept hold their old room otherwise.

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(key, value)
        self._files._drop(str(self.root / key))

    def set_sync(self, key: str, value: Buffer) -> None:
        super().set_sync(key, value)
        self._files._drop(str(self.root / key))

    async def delete(self, key: str) -> None:
        await super().delete(key)
        self._files._drop_removed()

    def delete_sync(self, key: str) -> None:
        super().delete_sync(key)
        self._files._drop_removed()

    async def delete_dir(self, prefix: str) -> None:
        await super().delete_dir(prefix)
        self._files._drop_removed()

    async def clear(self) -> None:
        await super().clear()
        self._files._drop_removed()

    def close(self) -> None:
        super().close()
        self._files._drop_all()

    def _read(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None
    ) -> Buffer:
        with self._files.open(str(self.root / key), "rb") as file:
            size = file.seek(0, 2)
            match byte_range:
                case None:
                    start, end = 0, size
                case RangeByteRequest():
                    start, end = byte_range.start, byte_range.end
                case OffsetByteRequest():
                    start, end = byte_range.offset, size
                case SuffixByteRequest():
                    start, end = max(0, size - byte_range.suffix), size
                case _:
                    raise TypeError(f"byte_range: {byte_range!r} is no request of zarr")
            file.seek(start)
            return prototype.buffer.from_bytes(file.read(max(0, end - start)))


__all__ = ["Store"]
