"""Databases that refuse: each one a StoreError with one clear sentence."""

import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from online_sao.errors import StoreError
from online_sao.store import RolloutStore, database, migration, models
from online_sao.store import store as store_module

FORK = multiprocessing.get_context("fork")
NOBODY = 65534


def answer_of(work, *args) -> str:
    """What `work` returns in a forked process, whose limits and user it may change."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()
    got = receiver.recv()
    process.join(30)
    return got


def refusal(work) -> str:
    try:
        work()
    except StoreError as error:
        return str(error)
    return "no error"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter (pytest's own may not be)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_reader(work) -> str:
    if os.getuid() == 0:  # root may write anywhere
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return refusal(work)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("store.sqlite", "is not a database URL"),
        ("mysql://host/x", "can be SQLite or PostgreSQL, not 'mysql'"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
    ],
)
def test_unusable_urls(url, sentence):
    with pytest.raises(StoreError, match=sentence):
        RolloutStore(url)


def test_the_folder_is_made_and_the_path_made_absolute(tmp_path, monkeypatch, kit):
    monkeypatch.chdir(tmp_path)
    with RolloutStore("sqlite:///deep/down/store.sqlite") as store:
        store.add(kit.rollout("x"))
        assert store.url == f"sqlite:///{tmp_path}/deep/down/store.sqlite"
    assert (tmp_path / "deep" / "down" / "store.sqlite").is_file()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/sub of the store cannot be made"):
        RolloutStore(f"sqlite:///{tmp_path}/file/sub/store.sqlite")


def test_a_file_that_is_not_a_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be taken for one" * 40)
    with pytest.raises(StoreError, match="is not an SQLite database"):
        RolloutStore(f"sqlite:///{path}")


def test_a_damaged_database(sqlite_url, kit):
    path = Path(sa.make_url(sqlite_url).database)
    with RolloutStore(sqlite_url) as store:
        for number in range(50):
            store.add(kit.rollout(f"r{number}"))
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged"):
        RolloutStore(sqlite_url).list()


def test_a_read_only_database(open_folder, kit):
    url = f"sqlite:///{open_folder}/store.sqlite"
    with RolloutStore(url) as store:
        store.add(kit.rollout("x"))
    (open_folder / "store.sqlite").chmod(0o444)
    open_folder.chmod(0o555)

    def record() -> None:
        RolloutStore(url).add(kit.rollout("y"))

    got = answer_of(as_reader, record)
    open_folder.chmod(0o755)
    assert got.startswith(f"The store at {open_folder}/store.sqlite")
    assert "is read-only" in got or "cannot be opened" in got
    with RolloutStore(url) as store:
        assert [r.id for r in store.list()] == ["x"]


def test_a_folder_that_may_not_be_written_to(open_folder):
    open_folder.chmod(0o555)
    got = answer_of(as_reader, lambda: RolloutStore(f"sqlite:///{open_folder}/store.sqlite"))
    assert "cannot be opened; check that the path exists and is writable" in got


def test_no_space_left(sqlite_url, kit):
    """The file-size limit of a process stands in for a full disk."""
    with RolloutStore(sqlite_url) as store:
        store.add(kit.rollout("first"))

    def fill() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        store = RolloutStore(sqlite_url)
        for number in range(10_000):
            got = refusal(lambda n=number: store.add(kit.rollout(f"r{n}", answer="x" * 1000)))
            if got != "no error":
                return f"{number} {refusal(store.counts)} {got}"
        return "never full"

    recorded, reading, sentence = answer_of(fill).split(" ", 2)
    assert sentence.endswith("no error") is False
    assert "disk" in sentence
    assert "free" in sentence
    assert reading == "no"
    with RolloutStore(sqlite_url) as store:  # nothing half-written; goes on once there is room
        assert len(store.list(limit=10_000)) == int(recorded) + 1
        assert store.add(kit.rollout("after")).seq == int(recorded) + 2


def test_a_writer_that_blocks_for_too_long(sqlite_url, kit, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    with RolloutStore(sqlite_url) as store:
        other = sqlite3.connect(sa.make_url(sqlite_url).database, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked by another process"):
            store.add(kit.rollout("x"))
        assert store.list() == []  # readers do not wait
        other.execute("ROLLBACK")
        other.close()
        assert store.add(kit.rollout("x")).seq == 1


def test_a_newer_schema_is_refused(kit, store, store_url, monkeypatch):
    for module in (store_module, migration):
        monkeypatch.setattr(module, "SCHEMA_VERSION", models.SCHEMA_VERSION - 1)
    newest = models.SCHEMA_VERSION
    says = rf"has schema {newest}, but .* up to {newest - 1}; upgrade online_sao"
    with pytest.raises(StoreError, match=says):
        RolloutStore(store_url)


def test_another_programs_database_is_left_alone(sqlite_url):
    path = Path(sa.make_url(sqlite_url).database)
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE counters (name TEXT, value INTEGER)")
    other.commit()
    with pytest.raises(StoreError, match="is not this program's"):
        RolloutStore(sqlite_url)
    assert other.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    other.close()


def test_tables_lost_under_our_feet(kit, store):
    engine = sa.create_engine(store.url)
    with engine.begin() as conn:
        conn.exec_driver_sql("DROP TABLE feedback")
    engine.dispose()
    store.add(kit.rollout("x"))
    with pytest.raises(StoreError, match="feedback"):
        store.add_feedback("x", 1.0)
    assert store.get("x").reward is None


def test_deleted_text_is_gone_from_the_files(sqlite_url, kit):
    folder = Path(sa.make_url(sqlite_url).database).parent
    secret = "correct horse battery staple"

    def found(text: str) -> bool:
        return any(text.encode() in part.read_bytes() for part in folder.iterdir())

    with RolloutStore(sqlite_url) as store:
        store.add(kit.rollout("x", answer=secret, metadata={"note": secret}))
        store.add(kit.rollout("y"))
        assert found(secret)
        store.delete_text("x")
        assert not found(secret)
        assert found("Drip, drop.")
