"""Runs `app.py` under gunicorn with two workers over the door, and another program beside it, on the
same database:

    python beside.py EXTENSION shell|backup|celery|litestream [PROGRAM]

`shell`: the program `sqlite3`, with SQLite's own VFS and with the door in turns, reads, changes,
checkpoints and vacuums. `backup`: its `.backup`, with both. `celery`: a worker with two processes.
`litestream`: a replica in a folder, which is restored at the end; PROGRAM is its path.

Exits with an error if a request or the program failed, a sum was not 0, an answered change is lost,
or a copy or the database is damaged.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from serve import ACCOUNTS, ask, client, make

SECONDS = 6
CLIENTS = 3
TASKS = 100


def checked(path):
    """Returns the sum, the visits and the integrity of a database or a copy."""
    database = sqlite3.connect(path)
    try:
        found = database.execute("select sum(amount), (select count(*) from visit) from account").fetchone()
        return found[0], found[1], database.execute("pragma integrity_check").fetchone()[0]
    finally:
        database.close()


class Beside:
    """What runs beside the server, on the database `path` in `folder`."""

    def __init__(self, extension, folder, program):
        self.extension, self.folder, self.program = extension, folder, program
        self.path = folder / "x.db"
        self.visits, self.problems, self.uses = 0, [], 0

    def sqlite(self, with_door, *commands):
        """Runs the shell, and returns what it printed."""
        line = ["sqlite3", "-bail"]
        if with_door:
            line += ["-cmd", f".load {self.extension} sqlite3_bifoliodefault_init"]
        # The door is loaded before the database is opened.
        script = "\n".join([f".open {self.path}", ".timeout 10000", *commands, ""])
        done = subprocess.run(line, input=script, capture_output=True, text=True, timeout=60)
        self.uses += 1
        if done.returncode or done.stderr:
            self.problems.append(f"{commands}: {done.returncode} {done.stderr}")
        return done.stdout.split()

    def shell(self, until):
        turn = 0
        while time.monotonic() < until:
            turn += 1
            with_door = turn % 2 == 0
            if self.sqlite(with_door, "select sum(amount) from account;") != ["0"]:
                self.problems.append("the shell saw half a change")
            source, target = random.randrange(ACCOUNTS), random.randrange(ACCOUNTS)
            self.sqlite(
                with_door,
                "begin immediate;",
                f"update account set amount=amount-1 where id={source};",
                f"update account set amount=amount+1 where id={target};",
                f"insert into visit(source) values({source});",
                "commit;",
            )
            self.visits += 1
            kind = ["passive", "truncate", "restart"][turn % 3]
            self.sqlite(with_door, f"pragma wal_checkpoint({kind});")
        self.sqlite(False, "vacuum;")

    def backup(self, until):
        turn = 0
        while time.monotonic() < until:
            turn += 1
            copy = self.folder / f"copy-{turn}.db"
            self.sqlite(turn % 2 == 0, f".backup {copy}")
            total, _, integrity = checked(copy)
            if (total, integrity) != (0, "ok"):
                self.problems.append(f"backup {turn}: {total} {integrity}")
            copy.unlink()

    def celery(self, until):
        done, queue = self.folder / "done", self.folder / "queue"
        queue.mkdir()
        done.touch()
        variables = {"DOOR": self.extension, "DATABASE": str(self.path), "QUEUE": str(queue), "DONE": str(done)}
        log = open(self.folder / "celery.txt", "w+")
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency=2", "--loglevel=warning"],
            cwd=Path(__file__).parent, env={**os.environ, **variables}, stdout=log, stderr=log,
        )
        os.environ.update({**variables, "DOOR": ""})
        from tasks import move

        try:
            for _ in range(TASKS):
                move.delay(random.randrange(ACCOUNTS), random.randrange(ACCOUNTS))
            for _ in range(600):
                self.visits = len(done.read_text().split())
                if self.visits >= TASKS or worker.poll() is not None:
                    break
                time.sleep(0.1)
        finally:
            worker.terminate()
            worker.wait(30)
        self.uses = self.visits
        if self.visits != TASKS:
            log.seek(0)
            self.problems.append(f"{self.visits} of {TASKS} tasks were done: {log.read()[-2000:]}")

    def litestream(self, until):
        replica = f"file://{self.folder}/replica"
        log = open(self.folder / "litestream.txt", "w+")
        replicating = subprocess.Popen(
            [self.program, "replicate", str(self.path), replica], stdout=log, stderr=log
        )
        time.sleep(max(0.0, until - time.monotonic()))
        # What was answered until now; litestream copies once a second.
        before = checked(self.path)
        time.sleep(3)
        replicating.send_signal(signal.SIGINT)
        replicating.wait(30)
        copy = self.folder / "restored.db"
        restored = subprocess.run(
            [self.program, "restore", "-o", str(copy), replica], capture_output=True, text=True
        )
        if not copy.exists():
            log.seek(0)
            self.problems.append(f"no replica: {restored.stderr} {log.read()[-2000:]}")
            return
        self.uses = 1
        total, visits, integrity = checked(copy)
        if (total, integrity) != (0, "ok") or visits < before[1]:
            self.problems.append(f"the replica: {total} {visits} {integrity}, and before: {before}")


def main():
    extension, kind = sys.argv[1], sys.argv[2]
    program = sys.argv[3] if len(sys.argv) > 3 else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beside = Beside(extension, folder, program)
        make(beside.path)
        environment = {**os.environ, "KEPT": "1", "DATABASE": str(beside.path), "DOOR": extension}
        port = random.randrange(20_000, 30_000)
        log = open(folder / "log.txt", "w+")
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "app:application", f"--bind=127.0.0.1:{port}", "--workers=2"],
            cwd=Path(__file__).parent, env=environment, stdout=log, stderr=log,
        )
        try:
            for _ in range(300):
                try:
                    if server.poll() is not None or ask(port, "/total")[0] == 200:
                        break
                except OSError:
                    pass
                time.sleep(0.1)
            until = time.monotonic() + SECONDS
            each = [{} for _ in range(CLIENTS)]
            threads = [
                threading.Thread(target=client, args=(port, until, seed, counts, beside.problems))
                for seed, counts in enumerate(each)
            ]
            for thread in threads:
                thread.start()
            getattr(beside, kind)(until)
            for thread in threads:
                thread.join()
        finally:
            server.terminate()
            server.wait(30)
        moves = beside.visits + sum(counts.get("move", 0) for counts in each)
        found = checked(beside.path)
        if found != (0, moves, "ok"):
            beside.problems.append(f"{found}, of {moves} answered changes")
        requests = sum(sum(counts.values()) for counts in each)
        print(f"{kind}: {beside.uses} uses beside {requests} requests, {moves} changes")
        if beside.problems or not requests or not beside.uses:
            log.seek(0)
            print(log.read()[-4000:], *beside.problems[:5], sep="\n", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
