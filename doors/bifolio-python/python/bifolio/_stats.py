"""Statistics as a dict that people can read."""

from __future__ import annotations

import html
from typing import Any

from ._sizes import format_size


class Stats(dict[str, Any]):
    """A snapshot of the counters of a cache.

    A dict from names to numbers: counts since the cache was built, and levels, which are bytes and
    end in ``_bytes``; docs/counters.md explains each. `str` and a notebook show the most useful
    ones as a table.
    """

    @property
    def hit_ratio(self) -> float | None:
        """Share of page lookups that found the page in memory; `None` before the first."""
        kinds = ("reads_hits_optimistic", "reads_hits_pinned", "reads_hits_slow")
        hits = sum(self.get(name, 0) for name in kinds)
        lookups = hits + self.get("reads_misses", 0)
        return hits / lookups if lookups else None

    def rows(self) -> list[tuple[str, str]]:
        """Returns the lines of the table: names and values as text."""

        def size(name: str) -> str:
            return format_size(self.get(name, 0))

        ratio = self.hit_ratio
        return [
            ("bound", size("memory_bound_bytes")),
            ("in use", size("memory_used_bytes")),
            ("dirty", size("memory_dirty_bytes")),
            ("hits", "-" if ratio is None else f"{ratio:.1%}"),
            ("read from devices", size("storage_read_bytes")),
            ("reads of devices", f"{self.get('storage_read_requests', 0):,}"),
            ("written to devices", size("storage_written_bytes")),
            ("evicted and read again", f"{self.get('evictions_refaults', 0):,} pages"),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:>12}" for name, value in rows)

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def html_table(rows: list[tuple[str, str]]) -> str:
    """Returns a table of two columns for notebooks."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:right'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"
