"""The process that `test_model.py` drives: does what it is told with arrays and files of a cache.

Commands are lines of JSON on standard input, answers lines on standard output. An answer has the
state after the command, so that the model learns how an interrupted one ended.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import signal
import sys
from typing import Any

import numpy as np

import bifolio

WIDTH = 600

cache = bifolio.Cache("1 MiB", worker_memory="512 KiB", flush_seconds=600)
arrays: dict[str, bifolio.Array] = {}
#: Streams of bytes, each a wrapper that buffers.
streams: dict[str, Any] = {}
#: Objects that are closed, of closed caches, or replaced, and still referenced.
kept: list[Any] = []
armed = False


def on_alarm(*_: object) -> None:
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt


def values_of(array: bifolio.Array) -> list[int]:
    """The value of each row; all elements of a row are equal."""
    found = []
    for chunk in array.chunks(50):
        assert (chunk == chunk[:, :1]).all(), "a row is torn"
        found += chunk[:, 0].tolist()
    return found


class Commands:
    def create(self, name: str, path: str, rows: int) -> None:
        if name in arrays:
            kept.append(arrays.pop(name))
        arrays[name] = cache.open_array(path, "w+", dtype="i8", shape=(rows, WIDTH))

    def open(self, name: str, path: str) -> None:
        arrays[name] = cache.open_array(path, "r+")

    def append(self, name: str, value: int, rows: int) -> None:
        arrays[name].append(np.full((rows, WIDTH), value))

    def assign(self, name: str, start: int, end: int, value: int) -> None:
        arrays[name][start:end] = value

    def flush(self, name: str) -> None:
        arrays[name].flush()

    def close(self, name: str) -> None:
        arrays[name].close()

    def drop(self, name: str) -> None:
        del arrays[name]
        gc.collect()

    def drop_kept(self) -> None:
        kept.clear()
        gc.collect()

    def close_cache(self) -> None:
        cache.close()

    def new_cache(self) -> None:
        global cache
        kept.append((cache, dict(arrays), dict(streams)))
        cache = bifolio.Cache("1 MiB", worker_memory="512 KiB", flush_seconds=600)
        arrays.clear()
        streams.clear()

    def pickle(self, name: str) -> str:
        return pickle.dumps(arrays[name]).hex()

    def fork(self, deep: bool) -> dict[str, Any]:
        """What a forked worker reads of each array: values, or the number of an error."""
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                if deep and (grandchild := os.fork()):
                    os.waitpid(grandchild, 0)
                    os._exit(0)
                found: dict[str, Any] = {}
                for name, array in arrays.items():
                    try:
                        found[name] = values_of(array)
                    except OSError as error:
                        found[name] = {"errno": error.errno}
                    except ValueError as error:
                        found[name] = {"closed": str(error)}
                with os.fdopen(writer, "w") as pipe:
                    json.dump(found, pipe)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return json.loads(text)  # type: ignore[no-any-return]

    def stream(self, name: str, path: str, mode: str) -> None:
        streams[name] = io.BufferedWriter(cache.open(path, mode), 300)

    def write(self, name: str, text: str) -> None:
        streams[name].write(text.encode())

    def flush_stream(self, name: str) -> None:
        streams[name].flush()
        # That of a wrapper ends at the raw file.
        streams[name].raw.flush()

    def close_stream(self, name: str) -> None:
        streams.pop(name).close()


def state() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        if array._handle.is_closed:
            found[name] = None
        else:
            found[name] = values_of(array)
    return {"arrays": found, "closed": cache.closed}


def main() -> None:
    global armed
    signal.signal(signal.SIGALRM, on_alarm)
    commands = Commands()
    for line in sys.stdin:
        name, arguments, delay = json.loads(line)
        if name == "end":
            break
        answer: dict[str, Any] = {"outcome": "done"}
        try:
            if delay is not None:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, delay)
            answer["result"] = getattr(commands, name)(*arguments)
            armed = False
        except KeyboardInterrupt:
            answer["outcome"] = "interrupted"
        except OSError as error:
            armed = False
            answer.update(outcome="refused", errno=error.errno, text=str(error))
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        answer["state"] = state()
        print(json.dumps(answer), flush=True)


main()
