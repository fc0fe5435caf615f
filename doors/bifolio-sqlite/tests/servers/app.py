"""A Django application in one file: counts visits in a table of accounts, whose sum stays 0.

`DOOR` in the environment names the extension of SQLite to load; `KEPT` keeps connections between
requests; `EARLY` opens the database when the application is loaded.
"""

import os
import sqlite3

if path := os.environ.get("DOOR"):
    loader = sqlite3.connect(":memory:")
    loader.enable_load_extension(True)
    loader.execute("select load_extension(?, 'sqlite3_bifoliodefault_init')", (path,))
    loader.close()

from django.conf import settings  # noqa: E402

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ["DATABASE"],
            "CONN_MAX_AGE": None if os.environ.get("KEPT") else 0,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 5,
                "init_command": "pragma journal_mode=wal; pragma synchronous=normal",
            },
        }
    },
)

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection, transaction  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.urls import path as route  # noqa: E402


def read(request, first):
    with connection.cursor() as cursor:
        cursor.execute(
            "select sum(amount), count(*) from account where id between %s and %s",
            (first, first + 40),
        )
        return HttpResponse(repr(cursor.fetchone()))


def total(request):
    with connection.cursor() as cursor:
        cursor.execute("select sum(amount), (select count(*) from visit) from account")
        return HttpResponse("%d %d" % cursor.fetchone())


def move(request, source, target):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("update account set amount=amount-1 where id=%s", (source,))
        cursor.execute("update account set amount=amount+1 where id=%s", (target,))
        cursor.execute("insert into visit(source) values(%s)", (source,))
    return HttpResponse("moved")


urlpatterns = [
    route("read/<int:first>", read),
    route("total", total),
    route("move/<int:source>/<int:target>", move),
]
application = get_wsgi_application()

if os.environ.get("EARLY"):
    with connection.cursor() as early:
        early.execute("select count(*) from account")
        early.fetchone()
