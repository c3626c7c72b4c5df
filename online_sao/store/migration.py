"""Bring an older database to the schema of this program, by alembic.

A revision's name is the schema's number: `migrations/versions/0002_*.py` makes schema 2. The
number in the table `counters` is the truth; alembic's own table follows it. A new database is
made at the newest schema and runs no revision. Migrations only go forward: the way back is the
copy that is made before (SQLite), or the backup (PostgreSQL).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy.engine import Connection

from online_sao.errors import StoreError
from online_sao.store.database import make_engine, parse_url, place_of, store_errors
from online_sao.store.models import SCHEMA_VERSION, counters

SCRIPTS = Path(__file__).parent / "migrations"
LOCK = 0x5A0  # PostgreSQL's advisory lock that also guards the making of tables


@dataclass(frozen=True)
class Migrated:
    """What `migrate` did; `backup` is the copy of the file as it was (SQLite only)."""

    before: int
    after: int
    backup: Path | None


def migrate(url: str) -> Migrated | None:
    """Bring the store at `url` to SCHEMA_VERSION; None where there is nothing to do.

    All revisions run in one transaction: after an error the database is as it was. Raises
    StoreError, also for a newer schema and for a database that is not a store.
    """
    parsed = parse_url(url)
    place = place_of(parsed)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite and not Path(place).is_file():
        return None  # opening it will make it
    engine = make_engine(parsed)
    try:
        with store_errors(place):
            with engine.connect() as conn:
                found = schema_of(conn)
            if found is None or found == SCHEMA_VERSION:
                return None
            if found > SCHEMA_VERSION:
                raise StoreError(newer_schema(place, found))
            backup = _copy(Path(place), found) if is_sqlite else None
            with engine.connect().execution_options(online_sao_write=True) as conn, conn.begin():
                if not is_sqlite:
                    conn.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
                upgrade(conn)
    finally:
        engine.dispose()
    return Migrated(found, SCHEMA_VERSION, backup)


def upgrade(conn: Connection, to: int = SCHEMA_VERSION) -> None:
    """Run the revisions from the schema that `conn` finds up to `to`, in its transaction."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = conn
    found = schema_of(conn)
    if found is not None:
        if found >= to:
            return  # another process was quicker
        command.stamp(config, _revision(found), purge=True)
    command.upgrade(config, _revision(to))
    if found is None:
        conn.execute(counters.insert().values(name="schema", value=to))
    else:
        conn.execute(counters.update().where(counters.c.name == "schema").values(value=to))


def schema_of(conn: Connection) -> int | None:
    """The number of the schema; None where there are no tables of ours."""
    if not sa.inspect(conn).has_table(counters.name):
        return None
    return conn.execute(sa.select(counters.c.value).where(counters.c.name == "schema")).scalar()


def older_schema(place: str, found: int) -> str:
    return (
        f"The store at {place} has schema {found}, and this online_sao needs {SCHEMA_VERSION}. "
        "Back it up and run `online-sao migrate`; `online-sao serve` does so by itself."
    )


def newer_schema(place: str, found: int) -> str:
    return (
        f"The store at {place} has schema {found}, but this version of online_sao knows schemas "
        f"up to {SCHEMA_VERSION}; upgrade online_sao."
    )


def _revision(schema: int) -> str:
    return f"{schema:04d}"


def _copy(file: Path, schema: int) -> Path:
    """A copy of the database as it is, taken with SQLite's own backup (its log included)."""
    target = file.with_name(f"{file.name}.schema{schema}")
    with (
        closing(sqlite3.connect(file)) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)
    return target
