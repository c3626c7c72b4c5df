"""Weights on their way from the learner to the engines: a checked file in shared memory.

No vllm in here: the learner's process writes, the replica's process verifies and loads.
Two files take turns and are overwritten in place, because giving fresh pages to a new file
costs several times the copy itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from online_sao.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
FILES_KEPT = 2  # the one that is served and the one that is being loaded
_MAX_HEADER_BYTES = 100_000_000
_BLOCK_WORDS = 1 << 17  # 1 MiB
_PROCESS_PREFIX = "online_sao-process-"


def endpoint_folder(run_dir: Path) -> Path:
    """Where the weights of the endpoint of `run_dir` pass through; it is its own to remove."""
    return SHARED_MEMORY / f"online_sao-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:10]}"


def process_folder() -> Path:
    """A folder for the weights of this process; those of killed processes are removed."""
    for folder in SHARED_MEMORY.glob(f"{_PROCESS_PREFIX}*"):
        owner = folder.name.removeprefix(_PROCESS_PREFIX)
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays
    return SHARED_MEMORY / f"{_PROCESS_PREFIX}{os.getpid()}"


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file with one version of the policy, as its writer vouches for it."""

    version: int
    path: str
    size: int  # bytes
    checksum: int  # of the whole file, see file_checksum
    layout: int  # CRC-32 of names, shapes and dtypes: equal for all versions of one model

    def verify(self) -> None:
        """Raise WeightUpdateError unless the file is exactly what its writer wrote."""
        try:
            size = os.stat(self.path).st_size
            if size != self.size:
                raise WeightUpdateError(
                    f"The weight file of version {self.version} has {size} bytes, not {self.size}."
                )
            if file_checksum(self.path) != self.checksum:
                raise WeightUpdateError(
                    f"The weight file of version {self.version} is damaged (its checksum differs)."
                )
            if layout_checksum(self.path) != self.layout:
                raise WeightUpdateError(
                    f"The weight file of version {self.version} has other tensors than announced."
                )
        except OSError as error:
            raise WeightUpdateError(
                f"The weight file of version {self.version} cannot be read: {error.strerror}."
            ) from None


def write_weight_file(
    folder: Path, version: int, tensors: Mapping[str, torch.Tensor]
) -> WeightFile:
    """Write `tensors` (CPU, contiguous, final dtype) as version `version`.

    The file of version - FILES_KEPT is overwritten: by then no engine may need it.
    Raises WeightUpdateError when there is no room.
    """
    path = folder / f"weights-{version % FILES_KEPT}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _overwrite(path, tensors):
            _write_new(path, tensors)
    except Exception as error:  # safetensors raises its own type for a full disk
        raise WeightUpdateError(
            f"Weight version {version} cannot be written to {folder}: {error}."
        ) from None
    return WeightFile(
        version, str(path), path.stat().st_size, file_checksum(path), layout_checksum(path)
    )


def copy_weight_file(file: WeightFile, data: bytes | memoryview, folder: Path) -> WeightFile:
    """`file`, whose bytes came from another machine as `data`, as a file of this one.

    The copies of an earlier version take turns like the originals. Raises WeightUpdateError
    when there is no room; what arrived is checked by `WeightFile.verify` as ever.
    """
    path = folder / f"weights-{file.version % FILES_KEPT}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise WeightUpdateError(
            f"Weight version {file.version} cannot be written to {folder}: {error.strerror}."
        ) from None
    return replace(file, path=str(path))


def file_checksum(path: str | Path) -> int:
    """CRC-32 over the sums of the file's words, one sum per MiB: at the speed of memory.

    It is there to find a torn or damaged file, not a forged one.
    """
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size == 0:
            return 0
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = np.frombuffer(mapped, np.uint8)
            words = data[: size // 8 * 8].view("<u8")
            whole = len(words) // _BLOCK_WORDS * _BLOCK_WORDS
            sums = words[:whole].reshape(-1, _BLOCK_WORDS).sum(axis=1, dtype=np.uint64)
            rest = words[whole:].sum(dtype=np.uint64)
            tail = bytes(data[size // 8 * 8 :])
            del data, words  # the map cannot be closed while an array looks into it
    return zlib.crc32(tail, zlib.crc32(sums.tobytes() + rest.tobytes()))


def layout_checksum(path: str | Path) -> int:
    """CRC-32 over sorted (name, dtype, shape) of a safetensors file's header.

    Raises WeightUpdateError when the file has no readable header.
    """
    rows = sorted(
        (name, entry["dtype"], entry["shape"]) for name, entry in _read_header(path)[0].items()
    )
    return zlib.crc32(json.dumps(rows).encode())


def _read_header(path: str | Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensor entries of a safetensors file, and where its data begin."""
    try:
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError("header length")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for entry in header.values():
            entry["dtype"], entry["shape"], entry["data_offsets"]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise WeightUpdateError(f"{path} is not a safetensors file.") from None
    return header, 8 + length


def _write_new(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _overwrite(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Put `tensors` into an existing file of the same layout; False if it is not of that."""
    import torch

    if not path.is_file():
        return False
    header, start = _read_header(path)
    if header.keys() != tensors.keys():
        return False
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()
    }
    for name, tensor in tensors.items():
        same = header[name]["shape"] == list(tensor.shape)
        if not (same and sizes[name] == tensor.numel() * tensor.element_size()):
            return False
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        target = torch.frombuffer(mapped, dtype=torch.uint8)
        for name, tensor in tensors.items():
            begin, end = (start + offset for offset in header[name]["data_offsets"])
            target[begin:end].copy_(tensor.contiguous().flatten().view(torch.uint8))
        del target
    return True
