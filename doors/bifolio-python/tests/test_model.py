"""A model of what a writer promises, beside a writer that is forked, interrupted, killed and ended.

Commands go to a process of its own (`host_of_model.py`) in random order, on a disk that is full at
times. After each, this process reads the files as any other program would, and compares them with
what was promised: the table at the head of `bifolio/_process.py`.

`BIFOLIO_MODEL_SECONDS` says how long it runs.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

HOST = Path(__file__).parent / "host_of_model.py"
NAMES = ["a", "b"]
CHOICES = st.integers(0, 1 << 16)


class File:
    """What is known of a `.npy` file."""

    def __init__(self, rows: int) -> None:
        #: Value of each row, as the writer sees it.
        self.now = [0] * rows
        #: Values that another reader may find in each row.
        self.allowed = [{0} for _ in range(rows)]
        #: Rows that a header may count.
        self.counts = {rows}

    def note_sync(self) -> None:
        self.allowed = [{value} for value in self.now]
        self.counts = {len(self.now)}

    def note_try(self) -> None:
        """A sync that was interrupted or failed."""
        self.counts.add(len(self.now))

    def learn(self, values: list[int]) -> None:
        """Takes the values that the writer sees now."""
        for row, value in enumerate(values):
            if row == len(self.now):
                self.now.append(value)
                self.allowed.append({value})
            self.now[row] = value
            self.allowed[row].add(value)


class Life(RuleBasedStateMachine):
    disk: Path
    filler: Path | None

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=self.disk))
        self.files: dict[str, File] = {}
        #: Open handles of the writer: name, and name of the file.
        self.handles: dict[str, str] = {}
        self.lengths: dict[str, int] = {}
        self.value = 0
        self.is_full = False
        #: A stream of bytes: all that was written, and how much of it was flushed.
        self.written: dict[str, bytes] = {}
        self.flushed: dict[str, int] = {}
        self.open_streams: set[str] = set()
        self.log: list[str] = []
        self.start()

    def start(self) -> None:
        errors = open(self.directory / "errors", "ab")
        self.host = subprocess.Popen(
            [sys.executable, str(HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        errors.close()

    def path(self, name: str) -> str:
        return str(self.directory / f"{name}.npy")

    def call(self, command: str, *arguments: Any, delay: float | None = None) -> Any:
        assert self.host.stdin is not None and self.host.stdout is not None
        self.log.append(f"{command} {arguments} {delay}")
        self.host.stdin.write(json.dumps([command, arguments, delay]) + "\n")
        self.host.stdin.flush()
        line = self.host.stdout.readline()
        errors = (self.directory / "errors").read_text()
        assert line, f"the writer died:\n{errors}\n" + "\n".join(self.log)
        answer = json.loads(line)
        self.log.append(f"  {answer['outcome']} {answer.get('text', '')}")
        # Only a full disk is a reason to refuse.
        assert answer["outcome"] != "refused" or self.is_full, answer
        return answer

    def check(self, has_ended: bool = False) -> None:
        """Reads all files as another program would."""
        for name, file in self.files.items():
            found = np.load(self.path(name))
            assert len(found) in file.counts, (name, len(found), file.counts, self.log)
            for row, values in enumerate(found):
                seen = set(np.unique(values).tolist())
                assert seen <= file.allowed[row], (name, row, seen, file.allowed[row], self.log)
        for name, data in self.written.items():
            content = (self.directory / name).read_bytes()
            length = self.flushed[name]
            assert content[:length] == data[:length], (name, length, len(content), self.log)
            assert len(content) <= len(data)

    def learn(self, answer: Any) -> None:
        """Takes the values that the handles show, which must be those of the model."""
        for handle, values in answer["state"]["arrays"].items():
            if values is not None and handle in self.handles:
                file = self.files[self.handles[handle]]
                assert file.now[: len(values)] == values, (handle, self.log)
                assert len(values) == self.lengths[handle], (handle, self.log)

    def next_value(self) -> int:
        self.value += 1
        return self.value

    # Files and handles.

    @rule(name=st.sampled_from(NAMES), rows=st.integers(0, 60))
    def create(self, name: str, rows: int) -> None:
        if self.is_full:
            return
        # Older handles of the file go on, but cannot append; the host keeps what it replaces.
        for handle in [handle for handle, of in self.handles.items() if of == name]:
            if handle != name:
                self.call("drop", handle)
            self.handles.pop(handle)
        answer = self.call("create", name, self.path(name), rows)
        assert answer["outcome"] == "done"
        self.files[name] = File(rows)
        self.handles[name], self.lengths[name] = name, rows
        self.learn(answer)
        self.check()

    @rule(name=st.sampled_from(NAMES), second=st.booleans())
    def open(self, name: str, second: bool) -> None:
        if name not in self.files:
            return
        handle = f"{name}2" if second else name
        if handle in self.handles:
            return
        answer = self.call("open", handle, self.path(name))
        if answer["outcome"] != "done":
            return
        self.handles[handle], self.lengths[handle] = name, len(self.files[name].now)
        self.learn(answer)

    def pick(self, choice: int) -> str | None:
        # Nothing is drawn that depends on how a call ended: hypothesis would call that flaky.
        handles = sorted(self.handles)
        return handles[choice % len(handles)] if handles else None

    # Writes. A delay is an interrupt.

    DELAYS = st.one_of(st.none(), st.none(), st.floats(0.00001, 0.002))

    @rule(choice=CHOICES, rows=st.integers(1, 40), delay=DELAYS)
    def append(self, choice: int, rows: int, delay: float | None) -> None:
        if (handle := self.pick(choice)) is None:
            return
        file, value = self.files[self.handles[handle]], self.next_value()
        answer = self.call("append", handle, value, rows, delay=delay)
        if answer["outcome"] == "done" or answer["state"]["arrays"][handle][-1:] == [value]:
            # An interrupt came after it, if there was one.
            file.now += [value] * rows
            file.allowed += [{value} for _ in range(rows)]
            self.lengths[handle] = len(file.now)
        self.learn(answer)
        self.check()

    @rule(choice=CHOICES, delay=DELAYS)
    def assign(self, choice: int, delay: float | None) -> None:
        if (handle := self.pick(choice)) is None or not self.lengths[handle]:
            return
        file, value = self.files[self.handles[handle]], self.next_value()
        random = np.random.default_rng(choice)
        start = int(random.integers(0, self.lengths[handle]))
        end = int(random.integers(start, self.lengths[handle])) + 1
        answer = self.call("assign", handle, start, end, value, delay=delay)
        values = answer["state"]["arrays"][handle]
        for row in range(start, end):
            assert values[row] in (file.now[row], value), self.log
            assert values[row] == value or answer["outcome"] != "done", self.log
            file.allowed[row].add(value)
            file.now[row] = values[row]
        self.learn(answer)
        self.check()

    # Promises.

    @rule(choice=CHOICES, delay=DELAYS)
    def flush(self, choice: int, delay: float | None) -> None:
        if (handle := self.pick(choice)) is None:
            return
        answer = self.call("flush", handle, delay=delay)
        file = self.files[self.handles[handle]]
        file.note_sync() if answer["outcome"] == "done" else file.note_try()
        self.learn(answer)
        self.check()

    @rule(choice=CHOICES, drop=st.booleans(), delay=DELAYS)
    def close(self, choice: int, drop: bool, delay: float | None) -> None:
        if (handle := self.pick(choice)) is None:
            return
        answer = self.call("drop" if drop else "close", handle, delay=None if drop else delay)
        file = self.files[self.handles[handle]]
        is_closed = answer["state"]["arrays"].get(handle) is None
        # Nothing is said where there is no caller.
        is_done = answer["outcome"] == "done" and not (drop and self.is_full)
        file.note_sync() if is_done else file.note_try()
        if is_closed:
            del self.handles[handle]
        assert is_closed or answer["outcome"] == "interrupted", self.log
        self.learn(answer)
        self.check()

    @rule(delay=DELAYS, again=st.booleans())
    def close_cache(self, delay: float | None, again: bool) -> None:
        answer = self.call("close_cache", delay=delay)
        if answer["state"]["closed"]:
            self.handles.clear()
            for file in self.files.values():
                file.note_sync()
            for name in self.open_streams:
                # What the wrapper buffers has nowhere to go.
                self.written[name] = self.written[name][: self.flushed[name]]
            self.written = {n: d for n, d in self.written.items() if n not in self.open_streams}
            self.open_streams.clear()
            self.call("new_cache")
        else:
            assert answer["outcome"] != "done", self.log
            for file in self.files.values():
                file.note_try()
            if again and not self.is_full:
                assert self.call("close_cache")["state"]["closed"]
                self.handles.clear()
                self.written = {n: d for n, d in self.written.items() if n not in self.open_streams}
                self.open_streams.clear()
                for file in self.files.values():
                    file.note_sync()
                self.call("new_cache")
        self.check()

    @rule()
    def drop_kept(self) -> None:
        self.learn(self.call("drop_kept"))
        for file in self.files.values():
            file.note_try()
        self.check()

    # Other processes.

    @rule(deep=st.booleans())
    def fork(self, deep: bool) -> None:
        answer = self.call("fork", deep)
        for handle, values in answer["result"].items():
            if handle not in self.handles:
                continue
            if isinstance(values, dict):
                assert self.is_full and "errno" in values, (handle, values, self.log)
                continue
            file = self.files[self.handles[handle]]
            assert values == file.now[: self.lengths[handle]], (handle, self.log)
        self.learn(answer)
        self.check()

    @rule(choice=CHOICES)
    def pickle(self, choice: int) -> None:
        if (handle := self.pick(choice)) is None:
            return
        answer = self.call("pickle", handle)
        if answer["outcome"] == "done":
            array = pickle.loads(bytes.fromhex(answer["result"]))
            found = array[:, 0].tolist()
            array.close()
            array.cache.close()
            file = self.files[self.handles[handle]]
            assert found == file.now[: self.lengths[handle]], self.log
        self.check()

    # Streams of bytes.

    @rule(name=st.sampled_from(["x", "y"]), mode=st.sampled_from(["wb", "ab"]))
    def stream(self, name: str, mode: str) -> None:
        if name in self.open_streams or self.is_full:
            return
        assert self.call("stream", name, str(self.directory / name), mode)["outcome"] == "done"
        path = self.directory / name
        self.written[name] = path.read_bytes()
        self.flushed[name] = len(self.written[name])
        self.open_streams.add(name)

    @rule(name=st.sampled_from(["x", "y"]), length=st.integers(1, 2000))
    def write(self, name: str, length: int) -> None:
        if name not in self.open_streams or self.is_full:
            return
        text = f"{self.next_value():06}" * (length // 6 + 1)
        assert self.call("write", name, text)["outcome"] == "done"
        self.written[name] += text.encode()
        self.check()

    @rule(name=st.sampled_from(["x", "y"]), close=st.booleans())
    def flush_stream(self, name: str, close: bool) -> None:
        if name not in self.open_streams or self.is_full:
            return
        command = "close_stream" if close else "flush_stream"
        assert self.call(command, name)["outcome"] == "done"
        self.flushed[name] = len(self.written[name])
        if close:
            self.open_streams.remove(name)
        self.check()

    # The disk.

    @precondition(lambda self: self.filler is not None)
    @rule()
    def fill(self) -> None:
        assert self.filler is not None
        if not self.is_full:
            self.is_full = True
            with open(self.filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass

    @rule()
    def free(self) -> None:
        if self.is_full:
            assert self.filler is not None
            os.unlink(self.filler)
            self.is_full = False

    # Ends.

    @rule()
    def kill(self) -> None:
        self.host.kill()
        with self.host:
            pass
        self.after_the_end(is_clean=False)

    @rule()
    def end(self) -> None:
        self.log.append("end")
        was_full = self.is_full
        self.stop()
        if not was_full:
            for file in self.files.values():
                file.note_sync()
            for name in self.written:
                self.flushed[name] = len(self.written[name])
        else:
            for file in self.files.values():
                file.note_try()
        self.after_the_end(is_clean=not was_full)

    def stop(self) -> None:
        assert self.host.stdin is not None
        with self.host:
            self.host.stdin.write('["end", [], null]\n')
        assert self.host.returncode == 0, self.log

    def after_the_end(self, is_clean: bool) -> None:
        self.check()
        self.free()
        self.start()
        self.handles.clear()
        for name in self.open_streams | set(self.written):
            self.written[name] = (self.directory / name).read_bytes()
            self.flushed[name] = len(self.written[name])
        self.open_streams.clear()
        for name, file in self.files.items():
            found = np.load(self.path(name))
            file.counts = {len(found)}
            # A row that was written in part is written anew.
            torn = [row for row, values in enumerate(found) if (values != values[0]).any()]
            assert not torn or not is_clean
            file.now = found[:, 0].tolist()
            file.allowed = [set(np.unique(values).tolist()) for values in found]
            if torn:
                mapped = np.lib.format.open_memmap(self.path(name), "r+")
                for row in torn:
                    mapped[row] = mapped[row, 0]
                mapped.flush()
                file.allowed = [{value} for value in file.now]

    def teardown(self) -> None:
        self.free()
        if self.host.poll() is None:
            self.end()
            self.stop()
        subprocess.run(["rm", "-rf", str(self.directory)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path | None]]:
    """A small file system that can be filled, where one can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    made = subprocess.run(["mkfs.ext4", "-qFO", "^has_journal", str(image)], capture_output=True)
    command = ["mount", "-o", "loop", str(image), str(place)]
    if made.returncode or subprocess.run(command, capture_output=True).returncode:
        yield place, None
        return
    yield place, place / "filler"
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_readers_find_what_was_promised(disk: tuple[Path, Path | None]) -> None:
    Life.disk, Life.filler = disk
    seconds = float(os.environ.get("BIFOLIO_MODEL_SECONDS", "10"))
    steps = settings(
        max_examples=3,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run_state_machine_as_test(Life, settings=steps)
