"""Weights on their way from the learner to the engines: a checked file in shared memory.

No vllm in here: the learner's process writes, the replica's process verifies and loads.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from online_sao.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
FILES_KEPT = 2  # the one that is served and the one that is being loaded
_MAX_HEADER_BYTES = 100_000_000
_CHECKSUM_BLOCK = 1 << 22


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file with one version of the policy, as its writer vouches for it."""

    version: int
    path: str
    size: int  # bytes
    checksum: int  # CRC-32 of the whole file
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
    """Write `tensors` (CPU, final dtype) as version `version`; keep the last FILES_KEPT files.

    Raises WeightUpdateError when there is no room.
    """
    from safetensors.torch import save_file

    path = folder / f"weights-{version}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_file(dict(tensors), partial, metadata={"weight_version": str(version)})
        os.replace(partial, path)
    except Exception as error:  # safetensors raises its own type for a full disk
        partial.unlink(missing_ok=True)
        raise WeightUpdateError(
            f"Weight version {version} cannot be written to {folder}: {error}."
        ) from None
    for old in sorted(folder.glob("weights-*.safetensors"), key=_file_version)[:-FILES_KEPT]:
        old.unlink(missing_ok=True)
    return WeightFile(
        version, str(path), path.stat().st_size, file_checksum(path), layout_checksum(path)
    )


def file_checksum(path: str | Path) -> int:
    checksum = 0
    with open(path, "rb") as stream:
        while block := stream.read(_CHECKSUM_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def layout_checksum(path: str | Path) -> int:
    """CRC-32 over sorted (name, dtype, shape) of a safetensors file's header.

    Raises WeightUpdateError when the file has no readable header.
    """
    try:
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError("header length")
            header = json.loads(stream.read(length))
        rows = sorted(
            (name, entry["dtype"], entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, struct.error):
        raise WeightUpdateError(f"{path} is not a safetensors file.") from None
    return zlib.crc32(json.dumps(rows).encode())


def _file_version(path: Path) -> int:
    return int(path.stem.removeprefix("weights-"))
