"""Runs `app.py` under gunicorn with eight clients, with the door and with SQLite's own VFS in turns.

    python serve.py EXTENSION [SECONDS] [ROUNDS]

Prints the requests that each answered. Exits with an error if a request failed, a sum was not 0, an
answered change is lost, or the database is damaged.
"""

import http.client
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ACCOUNTS = 20_000
CLIENTS = 8
SETUPS = {
    "1 worker, 8 threads, kept": (["--workers=1", "--threads=8"], {"KEPT": "1"}),
    "4 workers, kept": (["--workers=4"], {"KEPT": "1"}),
    "4 workers": (["--workers=4"], {}),
    "4 workers, kept, preloaded": (["--workers=4", "--preload"], {"KEPT": "1", "EARLY": "1"}),
}


def make(path):
    database = sqlite3.connect(path)
    database.executescript(
        f"""pragma journal_mode=wal;
        create table account(id integer primary key, amount integer, filler text);
        create table visit(id integer primary key, source integer);
        with recursive i(id) as (select 0 union all select id + 1 from i where id < {ACCOUNTS} - 1)
            insert into account select id, 0, hex(zeroblob(100)) from i;"""
    )
    database.close()


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def client(port, until, seed, counts, problems):
    chance = random.Random(seed)
    while time.monotonic() < until:
        kind = chance.choices(["read", "total", "move"], [90, 1, 9])[0]
        source, target = chance.randrange(ACCOUNTS), chance.randrange(ACCOUNTS)
        path = {"read": f"/read/{source}", "total": "/total", "move": f"/move/{source}/{target}"}[kind]
        try:
            status, text = ask(port, path)
        except OSError as error:
            problems.append(f"{path}: {error!r}")
            continue
        if status != 200 or kind == "total" and not text.startswith("0 "):
            problems.append(f"{path}: {status} {text[:200]}")
            continue
        counts[kind] = counts.get(kind, 0) + 1


def run(setup, extension, seconds, folder):
    arguments, variables = SETUPS[setup]
    database = folder / "x.db"
    for old in folder.glob("x.db*"):
        old.unlink()
    make(database)
    environment = {**os.environ, **variables, "DATABASE": str(database), "DOOR": extension}
    port = random.randrange(20_000, 30_000)
    log = open(folder / "log.txt", "w+")
    server = subprocess.Popen(
        [sys.executable, "-m", "gunicorn", "app:application", f"--bind=127.0.0.1:{port}", *arguments],
        cwd=Path(__file__).parent, env=environment, stdout=log, stderr=log,
    )
    problems = []
    try:
        for _ in range(300):
            if server.poll() is not None:
                return 0, [f"the server ended: {(folder / 'log.txt').read_text()[-2000:]}"]
            try:
                if ask(port, "/total")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        each = [{} for _ in range(CLIENTS)]
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=client, args=(port, until, seed, counts, problems))
            for seed, counts in enumerate(each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait(30)
    moves = sum(counts.get("move", 0) for counts in each)
    check = sqlite3.connect(database)
    found = check.execute("select sum(amount), (select count(*) from visit) from account").fetchone()
    integrity = check.execute("pragma integrity_check").fetchone()[0]
    check.close()
    if found != (0, moves) and not problems or integrity != "ok":
        problems.append(f"sum and visits {found}, of {moves} answered; {integrity}")
    if problems:
        log.seek(0)
        print(log.read()[-4000:], file=sys.stderr)
    return sum(sum(counts.values()) for counts in each), problems


def main():
    extension = sys.argv[1]
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 3
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    has_failed = False
    with tempfile.TemporaryDirectory() as name:
        for setup in SETUPS:
            ratios, totals = [], [0, 0]
            for turn in range(rounds):
                served = [0, 0]
                for kind in ([0, 1] if turn % 2 == 0 else [1, 0]):
                    path = extension if kind == 0 else ""
                    served[kind], problems = run(setup, path, seconds, Path(name))
                    totals[kind] += served[kind]
                    if problems:
                        has_failed = True
                        print(f"{setup}: {len(problems)} problems: {problems[0]}", file=sys.stderr)
                ratios.append(served[0] / max(served[1], 1))
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{setup}: bifolio {totals[0]}, default {totals[1]} requests in {rounds} x {seconds:g} s,"
                f" ratio {statistics.median(ratios):.2f} ({spread})",
                flush=True,
            )
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
