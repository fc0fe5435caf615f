"""What a process knows of itself: whether it was forked, and how much memory it may use."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class _Writer(Protocol):
    def write_back(self) -> None: ...


#: Number of forks between this process and the first one: a value that differs from that of an
#: object says that the object was made by an ancestor.
generation = 0
#: Held while something is opened again in a child. A new one in each child, because a thread that
#: does not exist there may hold the old one.
reopening = threading.RLock()
#: Files with writes that the kernel may not have yet.
written: weakref.WeakSet[_Writer] = weakref.WeakSet()


def _before_fork() -> None:
    # A child reads the file, not the cache of its parent.
    for file in list(written):
        file.write_back()


def _in_child() -> None:
    global generation, reopening, written
    generation += 1
    reopening = threading.RLock()
    written = weakref.WeakSet()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _limits() -> list[int]:
    """Returns the limits of the control groups of this process (versions 1 and 2)."""
    limits = []
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as groups:
            lines = [line.rstrip("\n").split(":", 2) for line in groups]
    except OSError:
        return []
    for _, controllers, group in (line for line in lines if len(line) == 3):
        if controllers == "":
            top, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the group may be the top of what is mounted.
        path = group.strip("/")
        while True:
            try:
                with open(os.path.join(top, path, name), encoding="utf-8") as file:
                    limits.append(int(file.read()))
            except (OSError, ValueError):
                pass
            if not path:
                break
            path = os.path.dirname(path)
    return limits


def allowed_memory() -> int:
    """Returns the bytes of memory that the machine has and the control groups allow."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits()])
