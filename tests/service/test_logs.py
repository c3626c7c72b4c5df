"""Log files that a part leaves with every start, and how large they grow."""

import logging
import os
from logging.handlers import RotatingFileHandler

import pytest

from online_sao.config import ServiceConfig
from online_sao.service.logs import FOLDER, KEPT_FILES, forget_old_logs, start_log


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    for age, part in enumerate(("replica-c", "replica-a", "replica-b", "learner")):
        path = folder / f"{part}.jsonl"
        path.write_text("{}\n")
        os.utime(path, (1000 - age, 1000 - age))
    return folder


def left(folder):
    return {path.name for path in folder.iterdir()}


def test_those_that_wrote_last_stay_with_their_older_files(tmp_path, folder):
    for name in ("replica-a.jsonl.1", "replica-b.jsonl.1"):
        (folder / name).write_text("{}\n")
        os.utime(folder / name, (900, 900))
    forget_old_logs(tmp_path, "replica-", keep=2)
    assert left(folder) == {
        "replica-c.jsonl",
        "replica-a.jsonl",
        "replica-a.jsonl.1",
        "learner.jsonl",
    }


def test_no_folder(tmp_path):
    forget_old_logs(tmp_path, "replica-")


def test_a_log_grows_to_its_limit_and_its_oldest_lines_go(tmp_path):
    config = ServiceConfig(log_max_bytes=4096)
    start_log(config, tmp_path, "learner")
    logger = logging.getLogger("online_sao")
    try:
        for number in range(500):
            logger.warning("line %d", number)
    finally:
        for handler in [h for h in logger.handlers if isinstance(h, RotatingFileHandler)]:
            logger.removeHandler(handler)
            handler.close()
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) == KEPT_FILES + 1
    assert all(0 < path.stat().st_size <= 4096 for path in files)
    assert "line 499" in (tmp_path / FOLDER / "learner.jsonl").read_text()
    assert not any('"line 0"' in path.read_text() for path in files)


def test_a_name_is_no_pattern(tmp_path, folder):
    forget_old_logs(tmp_path, "*", keep=0)
    assert len(left(folder)) == 4
