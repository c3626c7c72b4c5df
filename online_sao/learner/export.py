"""A retained version as a model folder that transformers and vLLM load by themselves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from online_sao.config import Config
from online_sao.errors import ModelError, NotFoundError
from online_sao.learner.checkpoint import read_policy
from online_sao.learner.policy import load_causal_lm
from online_sao.prepare import model_hash, resolve_model
from online_sao.store import RolloutStore


def export_version(store: RolloutStore, out: Path, version: int | None = None) -> int:
    """Write the policy of `version` (default: the newest retained) to `out`; return its number.

    The weights are those that were served: rounded to the engine's dtype. `out` must not exist
    or be empty, and appears whole or not at all. Raises NotFoundError when no checkpoint of the
    version is retained, CheckpointError when it is damaged, ModelError when the start model is
    no longer what it was or `out` cannot be written.
    """
    from transformers import AutoTokenizer

    retained = store.retained_versions()
    chosen = next((v for v in retained if version in (None, v.version)), None)
    if chosen is None:
        numbers = ", ".join(str(v.version) for v in retained) or "none"
        what = "This endpoint" if version is None else f"Version {version}"
        raise NotFoundError(f"{what} has no retained checkpoint; retained: {numbers}.")
    assert chosen.checkpoint is not None
    run = next(run for run in store.runs() if run.id == chosen.run_id)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already; name a folder that is not.")
    source = resolve_model(run.model)
    if model_hash(source) != run.model_hash:
        raise ModelError(
            f"The model {source} has changed since the run began, and version {chosen.version} "
            "does not fit it; bring the former one back."
        )
    tensors = read_policy(Path(chosen.checkpoint))
    dtype = getattr(torch, Config.model_validate(run.config).engine.dtype)
    model = load_causal_lm(source, dtype, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones appear once, as in masters
            parameter.copy_(tensors[name])
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(source).save_pretrained(partial)
        os.replace(partial, out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(f"{out} cannot be written: {error.strerror or error}.") from None
    return chosen.version
