"""Arrays and files in other processes: fork, spawn, pickles, a data loader."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bifolio


def total(array: Any, start: int) -> tuple[int, int, int, int]:
    """Work of a worker: sums rows, and says where and within what bound."""
    rows = array[np.arange(start, len(array), 7)]
    return int(rows.sum()), os.getpid(), array.cache.memory, array.cache.stats()["memory_bound_bytes"]


def assign(array: Any) -> str:
    try:
        array[0] = 1
    except ValueError as error:
        return str(error)
    return "written"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_workers_reads(path: str, method: str) -> None:
    cache = bifolio.Cache("64 MiB", worker_memory="2 MiB")
    array = cache.open_array(path, "w+", dtype="i8", shape=(20_000, 16))
    array[:] = np.arange(20_000)[:, np.newaxis]
    with multiprocessing.get_context(method).Pool(3) as pool:
        found = pool.starmap(total, [(array, start) for start in range(7)])
        # What was written before the work was sent is seen; what a worker writes is refused.
        array[:] = 1
        assert pool.apply(total, (array, 0))[0] != 0
        assert "read-only" in pool.apply(assign, (array,))
    assert sum(result for result, *_ in found) == 16 * 20_000 * 19_999 // 2
    for _, process, memory, bound in found:
        assert process != os.getpid()
        assert memory == bound == 2 << 20
    assert cache.memory == 64 << 20
    array[5] = 7
    cache.close()
    assert np.load(path)[5, 0] == 7


def test_a_copy_in_the_same_process_does_not_keep_the_cache(path: str) -> None:
    np.save(path, np.arange(1000))
    cache = bifolio.Cache("16 MiB")
    array = cache.open_array(path + ".npy")
    copies = [copy.copy(array), pickle.loads(pickle.dumps(array))]
    assert all(found.cache is cache for found in copies)
    gone = weakref.ref(cache)
    del copies, array, cache
    gc.collect()
    assert gone() is None


def looked(array: Any) -> tuple[int, int, int, list[str]]:
    """Work of a worker: sums the rows. Also returns hits and misses so far, and what the kernel
    lacks."""
    total = int(array[np.arange(len(array))].sum())
    stats = array.cache.stats()
    hits = stats["reads_hits_optimistic"] + stats["reads_hits_slow"]
    return total, hits, stats["reads_misses"], stats["fallbacks"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_task_finds_the_pages_of_earlier_ones(path: str, method: str) -> None:
    np.save(path, np.arange(40_000, dtype="i8").reshape(4000, 10))
    array = bifolio.Cache("64 MiB", worker_memory="16 MiB").open_array(path + ".npy")
    with multiprocessing.get_context(method).Pool(1) as pool:
        # Each opens the array for itself, and closes it.
        found = pool.map(looked, [array] * 30, chunksize=1)
        assert {total for total, *_ in found} == {40_000 * 39_999 // 2}
        _, hits, misses, fallbacks = found[-1]
        if not any("kept" in text or "watches" in text for text in fallbacks):
            assert hits >= 0.9 * (hits + misses), found
            assert hits > 20 * found[0][2], found
        # Another program changes the file.
        np.save(path, np.zeros((4000, 10), dtype="i8"))
        assert pool.apply(looked, (array,))[0] == 0
    array.cache.close()


def in_child(body: Callable[[], Any]) -> Any:
    """Runs `body` in a forked child and returns its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result: Any = body()
        except BaseException as error:  # noqa: BLE001 - it is sent to the parent
            result = error
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(result, BaseException):
        raise result
    return result


def test_a_fork_inherits_arrays_and_files(path: str) -> None:
    cache = bifolio.Cache("32 MiB", worker_memory="1 MiB")
    array = cache.memmap(path, "i4", "w+", shape=(1 << 20,))
    array[:] = np.arange(1 << 20)
    file = cache.open(path)
    file.seek(400)

    def body() -> Any:
        # Before anything was used here, too.
        assert "not used here" in repr(cache)
        sums = int(array[::1000].sum()), file.read(4), cache.memory, cache.stats()["memory_bound_bytes"]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        # A grandchild.
        deeper = in_child(lambda: (int(array[77]), cache.stats()["memory_bound_bytes"]))
        # A file of its own may be written here.
        with cache.open(path + ".child", "wb") as other:
            other.write(b"from the child")
        return sums, deeper

    expected = int(np.arange(0, 1 << 20, 1000).sum()), (100).to_bytes(4, "little"), 1 << 20, 1 << 20
    assert in_child(body) == (expected, (77, 1 << 20))
    with open(path + ".child", "rb") as other:
        assert other.read() == b"from the child"
    # The parent goes on, and its writes are its own.
    array[0] = 9
    assert array[0] == 9 and file.tell() == 400
    cache.close()


def test_a_child_sees_what_was_written_before_the_fork(path: str) -> None:
    cache = bifolio.Cache("8 MiB", flush_seconds=600)
    array = cache.memmap(path, "i4", "w+", shape=(1000,))
    for number in range(1, 5):
        array[:] = number
        assert in_child(lambda: int(array[:].sum())) == 1000 * number
    cache.close()


def test_closed_stays_closed_in_a_child(path: str) -> None:
    cache = bifolio.Cache("8 MiB")
    array = cache.memmap(path, "i4", "w+", shape=(1000,))
    array.close()

    def body() -> None:
        with pytest.raises(ValueError, match="closed"):
            array[0]

    in_child(body)
    cache.close()
    in_child(body)


def test_pickles_are_paths(path: str) -> None:
    cache = bifolio.Cache("8 MiB")
    array = cache.open_array(path, "w+", dtype="f8", shape=(1 << 17,))
    array[:] = 2
    text = pickle.dumps(array)
    assert len(text) < 1500
    for same in (pickle.loads(text), copy.copy(array), copy.deepcopy(array)):
        assert same.cache is cache and same.mode == "r+"
        same[3] += 1
    assert array[3] == 5
    view = pickle.loads(pickle.dumps(array.T[np.newaxis].T if False else array.T))
    assert view.shape == array.T.shape
    cache.close()
    # The cache is gone: another one, within the bound of a worker.
    alone = pickle.loads(text)
    assert alone.mode == "r" and alone[3] == 5
    assert alone.cache.memory == cache.worker_memory
    assert pickle.loads(text).cache is alone.cache
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        pickle.loads(text)


class Rows:
    """A data set, as `torch.utils.data.Dataset` wants it."""

    def __init__(self, array: bifolio.Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        return self.array[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return list(self.array.take(indices))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("is_array", [False, True])
def test_a_data_loader(path: str, method: str, is_array: bool) -> None:
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed")
    main, each = bifolio.divide("64 MiB", 2)
    cache = bifolio.Cache(main, worker_memory=each)
    array = cache.open_array(path, "w+", dtype="f4", shape=(10_000, 32))
    array[:] = np.arange(10_000)[:, np.newaxis]
    array.flush()
    loader = data.DataLoader(
        array if is_array else Rows(array),
        batch_size=256,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    for _ in range(2):
        seen = np.concatenate([np.asarray(batch)[:, 0] for batch in loader])
        assert sorted(seen.tolist()) == list(range(10_000))
    cache.close()


def test_forks_while_threads_read(run: Callable[..., str], path: str) -> None:
    np.save(path, np.arange(1 << 20))
    os.rename(path + ".npy", path)
    printed = run(
        """
import os, sys, threading
import numpy as np, bifolio
cache = bifolio.Cache("1 MiB", worker_memory="1 MiB")
array = cache.open_array(sys.argv[1])
stop = threading.Event()
def read(seed):
    random = np.random.default_rng(seed)
    while not stop.is_set():
        indices = random.integers(0, 1 << 20, 100)
        assert (array[indices] == indices).all()
threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
for thread in threads: thread.start()
for number in range(100):
    child = os.fork()
    if child == 0:
        ok = (array[number::5000] == np.arange(number, 1 << 20, 5000)).all()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
print("all children read")
""",
        path,
        timeout=100,
    )
    assert "all children read" in printed


def test_many_threads_share_an_array(path: str) -> None:
    cache = bifolio.Cache("1 MiB")
    array = cache.open_array(path, "w+", dtype="i8", shape=(8, 40_000))
    failures: list[BaseException] = []

    def work(row: int) -> None:
        try:
            random = np.random.default_rng(row)
            expected = np.zeros(40_000, "i8")
            for number in range(60):
                where = np.unique(random.integers(0, 40_000, 500))
                array[row, where] = number
                expected[where] = number
                np.testing.assert_array_equal(array[row, ::3], expected[::3])
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    cache.close()
