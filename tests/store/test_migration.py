"""From the first schema to this one, with data in it, on both databases."""

from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from online_sao.cli import main
from online_sao.errors import StoreError
from online_sao.store import RolloutStore, migration, models
from online_sao.store.database import make_engine, parse_url
from online_sao.store.migration import migrate, schema_of, upgrade
from online_sao.types import Preference, RolloutState

FIRST = 1


@pytest.fixture
def engine(store_url):
    if store_url.startswith("sqlite"):
        Path(sa.make_url(store_url).database).parent.mkdir(exist_ok=True)
    made = make_engine(parse_url(store_url))
    yield made
    made.dispose()


def make_schema(engine, number):
    with engine.connect().execution_options(online_sao_write=True) as conn, conn.begin():
        upgrade(conn, number)
        conn.execute(
            models.counters.insert(), [{"name": name, "value": 0} for name in models.COUNTERS]
        )


def _options(index):
    return sorted((k, str(v)) for k, v in index.get("dialect_options", {}).items())


def shape(engine):
    """Tables with their columns, keys and indexes, as the database tells them."""
    inspector = sa.inspect(engine)
    found = {}
    for table in inspector.get_table_names():
        if table == "alembic_version":
            continue
        columns = [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)]
        indexes = sorted(
            (i["name"], tuple(i["column_names"]), _options(i)) for i in inspector.get_indexes(table)
        )
        keys = inspector.get_foreign_keys(table)
        found[table] = {
            "columns": sorted(columns),
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "indexes": indexes,
            "unique": sorted(
                tuple(u["column_names"]) for u in inspector.get_unique_constraints(table)
            ),
            "foreign": [
                (k["constrained_columns"], k["referred_table"], k["options"].get("ondelete"))
                for k in keys
            ],
        }
    return found


def test_migrated_and_newly_made_databases_are_the_same(engine, store_url):
    make_schema(engine, FIRST)
    done = migrate(store_url)
    assert (done.before, done.after) == (FIRST, models.SCHEMA_VERSION)
    migrated = shape(engine)
    with engine.connect() as conn:
        assert schema_of(conn) == models.SCHEMA_VERSION
    with engine.begin() as conn:
        models.metadata.drop_all(conn)
    RolloutStore(store_url).close()
    assert migrated == shape(engine)
    assert len(migrated) == len(models.metadata.tables)


def test_every_schema_has_one_revision():
    names = [path.name[:4] for path in (migration.SCRIPTS / "versions").glob("[0-9]*.py")]
    assert sorted(names) == [f"{n:04d}" for n in range(1, models.SCHEMA_VERSION + 1)]
    directory = ScriptDirectory(str(migration.SCRIPTS))
    assert directory.get_current_head() == f"{models.SCHEMA_VERSION:04d}"


def test_an_old_store_is_refused_until_it_is_migrated_and_keeps_its_rows(engine, store_url, kit):
    """`kit` has made a store of today; it is taken back to the first schema."""
    kit.rewarded("a", "b")
    kit.store.set_preference(Preference("cute", ("cute",)), None)
    kit.to_first_schema()
    with pytest.raises(StoreError, match=r"has schema 1, .* needs \d.*online-sao migrate"):
        RolloutStore(store_url)
    done = migrate(store_url)
    with RolloutStore(store_url) as store:
        assert [r.state for r in store.list()] == [RolloutState.REWARDED] * 2
        assert store.get("a").token_ids.tolist() == [10, 11, 12]
        assert store.preference().style == "cute"
        store.add(kit.rollout("c"))
    assert migrate(store_url) is None
    if store_url.startswith("sqlite"):
        # The copy from before still opens, as what it was.
        with closing(make_engine(parse_url(f"sqlite:///{done.backup}")).connect()) as conn:
            assert schema_of(conn) == 1
            assert (
                conn.execute(sa.select(sa.func.count()).select_from(models.rollouts)).scalar() == 2
            )
    else:
        assert done.backup is None


def test_the_command_migrates_and_says_from_what_to_what(engine, store_url, kit, capsys):
    kit.rewarded("a")
    kit.to_first_schema()
    assert main(["migrate", "--store", store_url]) == 0
    assert f"migrated from schema 1 to {models.SCHEMA_VERSION}" in capsys.readouterr().err
    with RolloutStore(store_url) as store:
        assert [r.id for r in store.list()] == ["a"]
    assert main(["migrate", "--store", store_url]) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_an_error_half_way_leaves_the_database_as_it_was(engine, store_url):
    make_schema(engine, FIRST)
    before = shape(engine)
    with engine.begin() as conn:  # the new index's name is taken, so its revision fails
        conn.exec_driver_sql("CREATE INDEX ix_rollouts_probe ON rollouts (reward)")
    taken = shape(engine)
    with pytest.raises(StoreError, match="ix_rollouts_probe"):
        migrate(store_url)
    assert shape(engine) == taken != before
    with engine.connect() as conn:
        assert schema_of(conn) == FIRST
        assert conn.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == "0001"


def test_nothing_is_made_where_there_is_no_store(sqlite_url):
    assert migrate(sqlite_url) is None
    assert not Path(sa.make_url(sqlite_url).database).exists()


def test_a_newer_store_is_refused(engine, store_url, monkeypatch):
    RolloutStore(store_url).close()
    monkeypatch.setattr(migration, "SCHEMA_VERSION", models.SCHEMA_VERSION - 1)
    with pytest.raises(StoreError, match="upgrade online_sao"):
        migrate(store_url)
