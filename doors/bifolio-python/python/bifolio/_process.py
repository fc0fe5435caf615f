"""What happens to files when the host acts on the process, and how much memory it may use.

What a call of the host leaves behind, for a file that is open for writing. *Kernel*: other
processes see it, and the death of this one cannot lose it. *Device*: a loss of power cannot
lose it. *Header*: the header of a ``.npy`` file counts the rows that were appended.

=================================  ==============  ==============  =============================
call                               kernel          device          header
=================================  ==============  ==============  =============================
assignment, `append`, `write`      5 s later       5 s later       at the next `flush` or `close`
`flush` of an array                yes             yes             yes, after the rows
`flush` of a file, a pickle        yes             5 s later       as before
`sync` of a file, `close`          yes             yes             yes, after the rows
fork                               yes             5 s later       as before
the last reference (`__del__`)     yes             yes             yes, after the rows
end of the interpreter (`atexit`)  yes             yes             yes, after the rows
writes after that                  yes             as `__del__`    as `__del__`
interrupt (`KeyboardInterrupt`)    as before       as before       as before
kill, `os._exit`, a crash          what was there  what was there  what was there
=================================  ==============  ==============  =============================

- `flush_seconds` sets the 5 s.
- A call that cannot do this raises `OSError`. A failed `close` closes the object, and the cache
  keeps the file with all that it must write, until :meth:`Cache.close` or another close succeeds.
  Where there is no caller, in `__del__` and at the end, Python prints the error.
- A fork cannot raise: the child raises `OSError` instead of reading a file whose writes could not
  be passed to the kernel.
- An interrupt comes before or after a compiled call, or between parts of a long read or
  assignment. Each change of state is within one such call: an `append` adds all rows or none.
- A kill leaves rows that no header counts. The next `append` writes over them.
- At the end of the interpreter caches stay open, because wrappers such as `io.BufferedWriter` are
  finalized later and write then. The last reference closes.
"""

from __future__ import annotations

import os
import sys
import threading

from . import _core


class Process:
    """State of this process. Not globals of a module, which are gone before the last object is."""

    #: Number of forks between this process and the first one: a value that differs from that of
    #: an object says that the object was made by an ancestor.
    generation = 0
    #: Held while something is opened again in a child. A new one in each child, because a thread
    #: that does not exist there may hold the old one.
    reopening = threading.RLock()


def _in_child() -> None:
    Process.generation += 1
    Process.reopening = threading.RLock()


# A child reads the file, not the cache of its parent.
os.register_at_fork(before=_core.before_fork, after_in_child=_in_child)


def is_worker() -> bool:
    """Returns `True` in a forked child and in a process of `multiprocessing`."""
    process = sys.modules.get("multiprocessing.process")
    return Process.generation > 0 or (
        process is not None and process.parent_process() is not None
    )


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
