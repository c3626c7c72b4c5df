"""A weight file is taken only if it is exactly what its writer wrote."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from online_sao.engine.weight_file import (
    FILES_KEPT,
    SHARED_MEMORY,
    copy_weight_file,
    process_folder,
    write_weight_file,
)
from online_sao.errors import WeightUpdateError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_a_written_file_is_accepted(tmp_path):
    file = write_weight_file(tmp_path, 3, TENSORS)
    file.verify()
    assert file.version == 3


def test_a_flipped_byte_is_refused(tmp_path):
    file = write_weight_file(tmp_path, 1, TENSORS)
    with open(file.path, "r+b") as stream:
        stream.seek(-3, 2)
        byte = stream.read(1)
        stream.seek(-3, 2)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightUpdateError, match="damaged"):
        file.verify()


def test_a_cut_file_is_refused(tmp_path):
    file = write_weight_file(tmp_path, 1, TENSORS)
    with open(file.path, "r+b") as stream:
        stream.truncate(file.size - 1)
    with pytest.raises(WeightUpdateError, match="bytes"):
        file.verify()


def test_a_missing_file_is_refused(tmp_path):
    file = write_weight_file(tmp_path, 1, TENSORS)
    gone = dataclasses.replace(file, path=str(tmp_path / "gone"))
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        gone.verify()


def test_other_tensors_than_announced_are_refused(tmp_path):
    announced = write_weight_file(tmp_path, 1, TENSORS)
    other = write_weight_file(tmp_path, 2, {**TENSORS, "a": torch.zeros(3, 2)})
    swapped = dataclasses.replace(other, layout=announced.layout)
    with pytest.raises(WeightUpdateError, match="other tensors"):
        swapped.verify()


def test_the_layout_does_not_depend_on_values_or_version(tmp_path):
    first = write_weight_file(tmp_path, 1, TENSORS)
    second = write_weight_file(tmp_path, 2, {name: t + 1 for name, t in TENSORS.items()})
    assert first.layout == second.layout
    assert first.checksum != second.checksum


def test_two_files_take_turns_and_hold_what_was_written_last(tmp_path):
    from safetensors.torch import load_file

    files = {
        version: write_weight_file(tmp_path, version, {n: t + version for n, t in TENSORS.items()})
        for version in range(8, 13)
    }
    assert len(list(tmp_path.iterdir())) == FILES_KEPT
    for version in (11, 12):
        files[version].verify()
        loaded = load_file(files[version].path)
        assert torch.equal(loaded["a"], TENSORS["a"] + version)
        assert torch.equal(loaded["b"], TENSORS["b"] + version)
    with pytest.raises(WeightUpdateError, match="damaged"):
        files[10].verify()  # its place was taken by version 12


def test_another_layout_replaces_the_file(tmp_path):
    write_weight_file(tmp_path, 1, TENSORS)
    other = {"a": torch.zeros(5), "c": torch.ones(2)}
    file = write_weight_file(tmp_path, 3, other)
    file.verify()
    wider = write_weight_file(tmp_path, 5, {name: t.double() for name, t in other.items()})
    wider.verify()
    assert wider.layout != file.layout


@pytest.mark.parametrize("place", [0, 9, 1 << 20, (5 << 20) + 3, -1, -9])
def test_the_checksum_sees_every_place(tmp_path, place):
    file = write_weight_file(tmp_path, 1, {"a": torch.arange(1_500_003, dtype=torch.float32)})
    with open(file.path, "r+b") as stream:
        stream.seek(place, 2 if place < 0 else 0)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 16]))
    with pytest.raises(WeightUpdateError):
        file.verify()


def test_a_folder_that_cannot_be_written_is_a_clear_error():
    from pathlib import Path

    with pytest.raises(WeightUpdateError, match="cannot be written"):
        write_weight_file(Path("/proc/no"), 1, TENSORS)


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_live_one_is_not():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = SHARED_MEMORY / f"online_sao-process-{ended.pid}"
    living = SHARED_MEMORY / f"online_sao-process-{os.getppid()}"
    try:
        for folder in (left, living):
            folder.mkdir()
        assert process_folder().name.endswith(str(os.getpid()))
        assert not left.exists()
        assert living.exists()
    finally:
        for folder in (left, living):
            shutil.rmtree(folder, ignore_errors=True)


def test_a_copy_from_another_machine_is_the_same_file(tmp_path):
    original = write_weight_file(tmp_path / "there", 3, TENSORS)
    data = np.fromfile(original.path, np.uint8)
    copy = copy_weight_file(original, memoryview(data), tmp_path / "here")
    assert Path(copy.path).parent == tmp_path / "here"
    assert (copy.version, copy.layout) == (3, original.layout)
    copy.verify()


def test_a_copy_that_was_cut_short_on_its_way_is_refused(tmp_path):
    original = write_weight_file(tmp_path / "there", 3, TENSORS)
    data = np.fromfile(original.path, np.uint8)[:-8]
    with pytest.raises(WeightUpdateError, match="bytes, not"):
        copy_weight_file(original, memoryview(data), tmp_path / "here").verify()


def test_no_room_for_a_copy(tmp_path):
    original = write_weight_file(tmp_path / "there", 3, TENSORS)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightUpdateError, match="version 3 cannot be written"):
        copy_weight_file(original, b"", tmp_path / "file" / "here")
