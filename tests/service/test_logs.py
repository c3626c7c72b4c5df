"""Log files that a part leaves with every start."""

import os

import pytest

from online_sao.service.logs import FOLDER, forget_old_logs


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


def test_a_name_is_no_pattern(tmp_path, folder):
    forget_old_logs(tmp_path, "*", keep=0)
    assert len(left(folder)) == 4
