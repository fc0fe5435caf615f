"""Celery tasks that change the database of `app.py`. The broker is a folder, `QUEUE`; each task that
has committed adds a line to the file `DONE`.

`DOOR` in the environment names the extension of SQLite to load. The connection is opened before the
worker forks its processes, as programs do by accident.
"""

import os
import sqlite3

from celery import Celery

if path := os.environ.get("DOOR"):
    loader = sqlite3.connect(":memory:")
    loader.enable_load_extension(True)
    loader.execute("select load_extension(?, 'sqlite3_bifoliodefault_init')", (path,))
    loader.close()

queue = os.environ["QUEUE"]
app = Celery("tasks", broker="filesystem://")
app.conf.update(
    broker_transport_options={
        "data_folder_in": queue,
        "data_folder_out": queue,
        "control_folder": queue,
    },
    task_acks_late=True,
    worker_prefetch_multiplier=16,
)
database = sqlite3.connect(os.environ["DATABASE"], timeout=10, isolation_level=None)
database.execute("select count(*) from account").fetchone()


@app.task
def move(source, target):
    database.execute("begin immediate")
    database.execute("update account set amount=amount-1 where id=?", (source,))
    database.execute("update account set amount=amount+1 where id=?", (target,))
    database.execute("insert into visit(source) values(?)", (source,))
    database.execute("commit")
    with open(os.environ["DONE"], "a") as done:
        done.write(f"{source}\n")
