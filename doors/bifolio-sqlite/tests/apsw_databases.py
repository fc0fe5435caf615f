"""apsw_databases.py EXTENSION DIRECTORY: databases through the package apsw, over the cache.

Random changes with savepoints, compared with a dictionary; blobs, backups in both directions,
VACUUM, connections, locks, the stock VFS and Python's own copy of SQLite beside, which an exclusive
database keeps out and others take turns with, and what the stock VFS finds afterwards.
"""

import itertools
import os
import random
import sqlite3
import subprocess
import sys

import apsw

extension, directory = sys.argv[1:]
loader = apsw.Connection(":memory:")
loader.enable_load_extension(True)
loader.load_extension(extension)
loader.close()
assert "bifolio" in apsw.vfs_names()

FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI


def connect(path, parameters="bifolio_memory=1MiB"):
    return apsw.Connection(f"file:{path}?vfs=bifolio&{parameters}", flags=FLAGS)


def check(connection, model):
    assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert dict(connection.execute("select id, v from t")) == model


def change(connection, model, numbers):
    """Changes rows of a model and of a table; some savepoints are rolled back."""
    for _ in range(60):
        trial = dict(model)
        connection.execute("savepoint s")
        for _ in range(numbers.randrange(1, 40)):
            key = numbers.randrange(2000)
            if numbers.random() < 0.2:
                trial.pop(key, None)
                connection.execute("delete from t where id=?", (key,))
            else:
                trial[key] = numbers.randbytes(numbers.randrange(0, 6000))
                connection.execute("insert or replace into t values(?,?)", (key, trial[key]))
        if numbers.random() < 0.3:
            connection.execute("rollback to s")
        else:
            model = trial
        connection.execute("release s")
    return model


def change_beside(other, connection, model, exclusive):
    """Reads and writes through another VFS or copy, which an exclusive database keeps out."""
    locked = (apsw.BusyError, sqlite3.OperationalError)
    for statement in ("select count(*) from t", "insert into t values(-1, x'01')"):
        try:
            rows = other.execute(statement).fetchall()
            assert not exclusive, f"let in: {statement}"
            assert rows in ([(len(model),)], [])
        except locked as problem:
            assert exclusive and "locked" in str(problem), f"{statement}: {problem}"
    if exclusive:
        return
    check(connection, model | {-1: b"\x01"})
    # Neither is let in beside a writer, and each sees what the other wrote.
    for writer, refused in ((other, connection), (connection, other)):
        writer.execute("begin immediate")
        writer.execute("delete from t where id=-1")
        try:
            refused.execute("begin immediate")
            raise AssertionError("two writers")
        except locked as problem:
            assert "locked" in str(problem), problem
        check(refused, model | {-1: b"\x01"})
        writer.execute("rollback")
    connection.execute("delete from t where id=-1")
    check(other, model)
    check(connection, model)


for mode, exclusive in itertools.product(("delete", "truncate", "persist", "wal"), (0, 1)):
    seed = random.randrange(1 << 32)
    print(f"{mode}, bifolio_exclusive={exclusive}: seed {seed}")
    numbers = random.Random(seed)
    path = os.path.join(directory, f"{mode}{exclusive}.db")
    kind = f"bifolio_exclusive={exclusive}"
    connection = connect(path, f"bifolio_memory=1MiB&{kind}")
    assert connection.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
    connection.execute("pragma cache_size=20")
    connection.execute("create table t(id integer primary key, v blob)")
    assert "memory_bound_bytes 1048576" in connection.execute("pragma bifolio_stats").fetchone()[0]
    model = change(connection, {}, numbers)
    check(connection, model)

    other = connect(path, kind)
    check(other, model)
    other.close()
    # The stock VFS of this copy of SQLite, then that of another copy in this process: two stock
    # ones at a time would not see each other's locks.
    stock = apsw.Connection(path)
    change_beside(stock, connection, model, exclusive)
    stock.close()
    beside = sqlite3.connect(path, timeout=0, isolation_level=None)
    change_beside(beside, connection, model, exclusive)
    beside.close()

    key = max(model, key=lambda key: len(model[key]))
    with connection.blob_open("main", "t", "v", key, True) as blob:
        blob.seek(17)
        blob.write(b"changed in place")
    model[key] = model[key][:17] + b"changed in place" + model[key][33:]
    check(connection, model)

    copy = apsw.Connection(":memory:")
    with copy.backup("main", connection, "main") as backup:
        backup.step()
    check(copy, model)
    connection.execute("delete from t; vacuum")
    check(connection, {})
    with connection.backup("main", copy, "main") as backup:
        backup.step()
    check(connection, model)
    connection.close()

    beside = sqlite3.connect(path, isolation_level=None)
    beside.execute("begin immediate")
    # Few pages: with many, SQLite would write some of them before the commit, and lock readers out.
    beside.execute("delete from t where id=(select min(id) from t)")
    for _ in range(3):
        try:
            check(connect(path, kind), model)
            assert not exclusive, "let in beside a writer of the other copy"
        except apsw.BusyError:
            assert exclusive, "kept out beside a writer of the other copy"
        # Two copies with the stock VFS would not see each other in one process.
        write = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0).execute('begin immediate')"
        tried = subprocess.run([sys.executable, "-c", write, path], capture_output=True, text=True)
        assert "locked" in tried.stderr, f"the lock of the other copy is gone: {tried.stderr}"
    beside.execute("rollback")
    beside.close()

    stock = apsw.Connection(path)
    check(stock, model)
    model = change(stock, model, numbers)
    stock.close()
    connection = connect(path, f"bifolio_memory=512KiB&bifolio_direct=never&{kind}")
    check(connection, model)
    model = change(connection, model, numbers)
    connection.close()
    check(apsw.Connection(path), model)
print("apsw", apsw.apsw_version(), "with SQLite", apsw.sqlite_lib_version(), "passed")
