"""A PostgreSQL server of the tests' own, from the Debian binaries, as a user that is not root.

ONLINE_SAO_TEST_POSTGRES_URL names a running one instead, in which schemas may be created.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

START_S = 60
URL_VARIABLE = "ONLINE_SAO_TEST_POSTGRES_URL"


def binaries() -> Path | None:
    """The folder of initdb and postgres, the newest version's; None where there is none."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: [int(part) for part in path.parts[4].split(".")],
    )
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A running server's URL; skips the test where no server is installed."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    folder = binaries()
    if folder is None:
        pytest.skip(
            f"no PostgreSQL server is installed (apt install postgresql, or {URL_VARIABLE})"
        )
    # Not under pytest's folder: others may not enter that, and socket paths must be short.
    home = Path(tempfile.mkdtemp(prefix="online_sao_pg"))
    as_user = {}
    if os.getuid() == 0:  # the server refuses to run as root
        user = _ordinary_user()
        os.chown(home, user.pw_uid, user.pw_gid)
        as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, log = home / "data", home / "log"
    try:
        subprocess.run(
            [
                *(folder / "initdb", "-D", data, "-U", "test", "-A", "trust"),
                *("-E", "UTF8", "--locale=C", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=home,
            **as_user,
        )
        settings = {"listen_addresses": "", "unix_socket_directories": str(home), "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [folder / "postgres", "-D", data, *options],
                stdout=out,
                stderr=out,
                cwd=home,
                **as_user,
            )
        try:
            url = f"postgresql://test@/postgres?host={home}"
            _wait(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # a fast shutdown
            process.wait(START_S)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def own_schema(url: str) -> Iterator[str]:
    """`url` with a schema of its own, removed afterwards."""
    schema = f"test_{uuid.uuid4().hex}"
    admin = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with admin.begin() as conn:
        conn.execute(sa.text(f"CREATE SCHEMA {schema}"))
    try:
        inside = sa.make_url(url).update_query_dict({"options": f"-csearch_path={schema}"})
        yield inside.render_as_string(hide_password=False)
    finally:
        with admin.begin() as conn:
            conn.execute(sa.text(f"DROP SCHEMA {schema} CASCADE"))
        admin.dispose()


def _ordinary_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("there is no user but root to run PostgreSQL as")


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    deadline = time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                engine.connect().close()
                return
            except sa.exc.OperationalError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
    finally:
        engine.dispose()
