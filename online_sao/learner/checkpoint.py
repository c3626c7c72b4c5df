"""Save and resume a learner: both models, both optimisers, random state, what it remembers.

A checkpoint is a folder `v{version}` with safetensors files and a `state.json` that names
every file with its size and checksum, and has one of its own. It is written beside its place,
synced and renamed, so it is either whole or not there; what a crash left half-written is
ignored and removed. No pickle is read or written.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from online_sao.errors import CheckpointError
from online_sao.learner.learner import Learner
from online_sao.learner.parameters import TrainedParameters

FORMAT = 1
STATE_FILE = "state.json"
POLICY_FILE = "policy.safetensors"
Release = Callable[[int], bool]
"""Whether the checkpoint of a version may go; asked right before it is removed."""
FREE_SPACE_FACTOR = 1.2  # refuse to start writing unless this much of the need is free


def save_checkpoint(folder: Path, learner: Learner, version: int, run_id: str) -> Path:
    """Write `folder/v{version}`; return it. Raises CheckpointError, leaving nothing behind."""
    target = folder / f"v{version}"
    partial = folder / f".v{version}.partial"
    files = _tensor_files(learner)
    need = checkpoint_bytes(learner)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < need * FREE_SPACE_FACTOR:
            raise CheckpointError(
                f"A checkpoint needs {need / 2**30:.1f} GiB and {folder} has "
                f"{free / 2**30:.1f} GiB free; learning goes on without it. Free some space or "
                "lower learner.checkpoint_keep."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        listed = {name: _write_tensors(partial / name, ts) for name, ts in files.items()}
        state = {
            "format": FORMAT,
            "version": version,
            "run_id": run_id,
            "files": listed,
            "learner": learner.state_dict(),
            "torch_rng": torch.get_rng_state().tolist(),
        }
        state["checksum"] = _state_checksum(state)
        _write_synced(partial / STATE_FILE, json.dumps(state).encode())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of version {version} cannot be written: "
            f"{getattr(error, 'strerror', None) or error}."
        ) from None
    return target


def checkpoint_bytes(learner: Learner) -> int:
    """What a checkpoint of `learner` takes on disk, about."""
    files = _tensor_files(learner)
    return sum(t.numel() * t.element_size() for ts in files.values() for t in ts.values())


def load_checkpoint(path: Path, learner: Learner) -> int:
    """Put a checkpoint into `learner`; return its version.

    Raises CheckpointError when it is missing, damaged, cut short, or of another model; then
    the learner is unchanged.
    """
    state = read_state(path)
    tensors = {name: _read_tensors(path / name, entry) for name, entry in state["files"].items()}
    _check_fits(path, tensors, learner)
    before = learner.state_dict()
    try:
        learner.load_state_dict(state["learner"])
    except (KeyError, TypeError, ValueError) as error:
        learner.load_state_dict(before)
        raise CheckpointError(
            f"The checkpoint {path} is of another preset: {type(error).__name__} {error}."
        ) from None
    for part, parameters in _parts(learner).items():
        parameters.load_masters(tensors[f"{part}.safetensors"])
        parameters.load_optimizer_tensors(tensors[f"{part}_optimizer.safetensors"])
    torch.set_rng_state(torch.tensor(state["torch_rng"], dtype=torch.uint8))
    return int(state["version"])


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Raises CheckpointError."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {STATE_FILE}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}.") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"The checkpoint {path} has a format that this program cannot read.")
    if state.pop("checksum", None) != _state_checksum(state):
        raise CheckpointError(f"The checkpoint {path} is damaged: {STATE_FILE} was changed.")
    return state


def read_policy(path: Path) -> dict[str, Tensor]:
    """The policy's float32 masters in a checkpoint, by Hugging Face names. Raises
    CheckpointError."""
    state = read_state(path)
    return _read_tensors(path / POLICY_FILE, state["files"][POLICY_FILE])


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(version, path) of the checkpoints in `folder`, newest first; not verified."""
    found = []
    for path in folder.glob("v*"):
        number = path.name.removeprefix("v")
        if number.isdigit() and (path / STATE_FILE).is_file():
            found.append((int(number), path))
    return sorted(found, reverse=True)


def prune_checkpoints(
    folder: Path,
    keep: int,
    pinned: Collection[int],
    left: Collection[int] = (),
    release: Release = lambda version: True,
) -> list[int]:
    """Remove all but the newest `keep` and the `pinned`; return the versions removed.

    Of those that a rollback `left` the newest `keep` stay too: they must not take the places
    of what it went back to. `release` is asked about each, and may still keep it.
    """
    removed = []
    ours, others = _on_the_line(folder, left)
    for version, path in [*ours[keep:], *others[keep:]]:
        if version not in pinned and release(version):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(version)
    for partial in folder.glob(".v*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    return removed


def make_room(
    folder: Path,
    needed_bytes: int,
    pinned: Collection[int],
    left: Collection[int] = (),
    release: Release = lambda version: True,
) -> list[int]:
    """Remove old checkpoints while less than `needed_bytes` are free, first those that a
    rollback `left`, never the newest of the others, a `pinned` one, or one that `release` keeps;
    return the versions removed."""
    removed: list[int] = []
    ours, others = _on_the_line(folder, left)
    for version, path in [*reversed(others), *reversed(ours[1:])]:
        if shutil.disk_usage(folder).free >= needed_bytes * FREE_SPACE_FACTOR:
            break
        if version in pinned or not release(version):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(version)
    return removed


def _on_the_line(
    folder: Path, left: Collection[int]
) -> tuple[list[tuple[int, Path]], list[tuple[int, Path]]]:
    """Checkpoints that no rollback has left, and the others."""
    held = list_checkpoints(folder)
    return [one for one in held if one[0] not in left], [one for one in held if one[0] in left]


def _parts(learner: Learner) -> dict[str, TrainedParameters]:
    parts = {"policy": learner.policy.parameters}
    if learner.critic is not None:
        parts["critic"] = learner.critic.parameters
    return parts


def _tensor_files(learner: Learner) -> dict[str, dict[str, Tensor]]:
    files = {}
    for part, parameters in _parts(learner).items():
        files[f"{part}.safetensors"] = parameters.masters()
        files[f"{part}_optimizer.safetensors"] = parameters.optimizer_tensors()
    return files


def _check_fits(path: Path, tensors: dict[str, dict[str, Tensor]], learner: Learner) -> None:
    """CheckpointError unless `tensors` are those of a learner of this model and these roles."""
    expected: dict[str, dict[str, tuple[int, ...]]] = {}
    for part, parameters in _parts(learner).items():
        shapes = {name: tuple(master.shape) for name, master in parameters.masters().items()}
        expected[f"{part}.safetensors"] = shapes
        moments = f"{part}_optimizer.safetensors"
        expected[moments] = {}
        if tensors.get(moments):  # there are none before the first step
            for name, shape in shapes.items():
                expected[moments] |= {f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
                expected[moments][f"{name}.step"] = ()
    found = {
        name: {key: tuple(tensor.shape) for key, tensor in file.items()}
        for name, file in tensors.items()
    }
    if found != expected:
        raise CheckpointError(f"The checkpoint {path} is of another model or preset.")


def _state_checksum(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return {"size": path.stat().st_size, "checksum": _checksum(path)}


def _read_tensors(path: Path, entry: dict[str, int]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        size, checksum = path.stat().st_size, None
        if size == entry["size"]:
            checksum = _checksum(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if checksum != entry["checksum"]:
        raise CheckpointError(f"{path} is damaged: its size or checksum is not the recorded one.")
    return load_file(path)


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
