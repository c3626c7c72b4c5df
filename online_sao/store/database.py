"""Connections to the store's database, and its refusals as StoreError.

The store writes through `make_engine`; who only looks (the dashboard) opens it read-only.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from online_sao.errors import StoreError

BUSY_TIMEOUT_S = 10.0  # how long a writer waits for another process before it gives up
CONNECT_TIMEOUT_S = 5  # for a PostgreSQL server that does not answer at all
SILENT_TIMEOUT_S = 10  # and for one that stops answering


def parse_url(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError(
            f"'{url}' is not a database URL; write sqlite:///path/to/store.sqlite or "
            "postgresql://user:password@host/database."
        ) from None
    name = parsed.drivername
    if name in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if name not in ("sqlite", "sqlite+pysqlite"):
        raise StoreError(f"The store can be SQLite or PostgreSQL, not '{name}'.")
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError(
            "The store needs a file, as several processes share it; write "
            "sqlite:///path/to/store.sqlite."
        )
    return parsed.set(database=str(Path(parsed.database).expanduser().absolute()))


def place_of(url: sa.URL) -> str:
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.render_as_string(hide_password=True)


def make_engine(url: sa.URL, *, read_only: bool = False) -> Engine:
    """An engine for a URL from `parse_url`. Read-only: the database must be there, and no
    statement can change it."""
    if url.get_backend_name() != "sqlite":
        if read_only:
            options = f"{url.query.get('options', '')} -c default_transaction_read_only=on"
            url = url.update_query_dict({"options": options.strip()})
        try:
            return sa.create_engine(url, pool_pre_ping=True, connect_args=_given_up_after(url))
        except ImportError:
            raise StoreError(
                "PostgreSQL needs the package psycopg: pip install 'online-sao[postgres]'."
            ) from None
    address = Path(str(url.database)).as_uri() + ("?mode=rw" if read_only else "?mode=rwc")

    def open_file() -> sqlite3.Connection:
        return sqlite3.connect(address, timeout=BUSY_TIMEOUT_S, check_same_thread=False, uri=True)

    engine = sa.create_engine(
        "sqlite://", creator=open_file, poolclass=sa.pool.QueuePool, max_overflow=32
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # BEGIN is written below, so that it can be IMMEDIATE
        if read_only:
            connection.execute("PRAGMA query_only=ON")
            return
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=ON")  # deleted texts are overwritten

    @sa.event.listens_for(engine, "begin")
    def _begin(conn: Connection) -> None:
        # A writer takes the lock at once: upgrading a read later could fail without waiting.
        write = conn.get_execution_options().get("online_sao_write", False)
        conn.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _given_up_after(url: sa.URL) -> dict[str, Any]:
    """Timeouts towards a host that does not answer at all, where the URL sets none: answers to
    clients wait until they are recorded or the store has failed."""
    wanted = {"connect_timeout": CONNECT_TIMEOUT_S, "tcp_user_timeout": 1000 * SILENT_TIMEOUT_S}
    return {name: value for name, value in wanted.items() if name not in url.query}


def _use_wal(connection: sqlite3.Connection) -> None:
    """Write-ahead log, so that readers and the writer do not wait for each other."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # the busy timeout does not cover this switch
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def store_errors(place: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except (sa.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise StoreError(_explain(error, place)) from error


def _explain(error: Exception, place: str) -> str:
    cause = getattr(error, "orig", None) or error
    text = " ".join(str(cause).split())
    low = text.lower()
    for sign, sentence in (
        ("locked", "is locked by another process for too long; see which one writes to it."),
        ("readonly", "is read-only; make the file and its folder writable."),
        ("disk is full", "has no disk space left; free some and try again."),
        ("no space left", "has no disk space left; free some and try again."),
        ("disk i/o", "cannot be read or written (disk error); check disk and free space."),
        ("unable to open", "cannot be opened; check that the path exists and is writable."),
        ("not a database", "is not an SQLite database; choose another file."),
        ("malformed", "is damaged; restore it from a backup or choose another file."),
        ("queuepool limit", "is busy: all its connections are in use; try again."),
    ):
        if sign in low:
            return f"The store at {place} {sentence}"
    if isinstance(error, sa.exc.OperationalError):
        return f"The store at {place} cannot be reached: {text}"
    return f"The store at {place} refused a statement: {text}"


def is_conflict(error: sa.exc.OperationalError) -> bool:
    return getattr(error.orig, "sqlstate", None) in ("40001", "40P01")
