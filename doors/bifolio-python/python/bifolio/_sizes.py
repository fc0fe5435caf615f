"""Sizes in bytes: read from texts, and written for people."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}


def parse_size(size: SupportsIndex | str) -> int:
    """Returns a size in bytes: an integer, or a text such as ``"4 GiB"``, ``"512M"``, ``"1.5 GB"``.

    ``K``, ``M``, ``G`` and ``T`` are powers of 1024, as are ``KiB`` to ``TiB``; ``KB`` to ``TB``
    are powers of 1000.

    >>> parse_size("4 GiB"), parse_size("1.5 kB"), parse_size(100)
    (4294967296, 1500, 100)
    """
    if not isinstance(size, str):
        return operator.index(size)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", size.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{size!r} is not a size; sizes are integers or texts such as '4 GiB'")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(size: float) -> str:
    """Returns a size as people read it.

    >>> format_size(3 << 30), format_size(100), format_size(1536)
    ('3.0 GiB', '100 B', '1.5 KiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def divide(memory: SupportsIndex | str, workers: int) -> tuple[int, int]:
    """Divides a bound among a process and its workers.

    Bounds of processes add up: a cache of 4 GiB whose workers have 1 GiB each uses up to
    4 + n GiB with n workers. The two results make them add up to `memory`:

    >>> memory, worker_memory = divide("8 GiB", workers=7)
    >>> memory == worker_memory == 1 << 30
    True

    Args:
        memory: bytes for all processes together.
        workers: number of workers that use the cache at a time.

    Returns:
        The arguments `memory` and `worker_memory` of :class:`Cache`, in bytes.
    """
    if workers < 0:
        raise ValueError(f"{workers} workers are fewer than none")
    each = parse_size(memory) // (workers + 1)
    return each, each
