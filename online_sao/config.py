"""All settings and presets.

A config file is TOML with one table per class below (`[model]`, `[engine]`, `[learner]`,
`[judge]`, `[preference]`, `[guards]`, `[store]`, `[service]`). Unknown keys are errors. Precedence:
overrides (options and `--set`), then the file, then the preset, then the defaults written here.
`online-sao settings` prints them all, as such a file. The variables of the environment, none of
which is a setting, are listed in docs/operations.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from online_sao.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-writer"


@functools.cache
def native_dtype() -> Literal["bfloat16", "float32"]:
    """The arithmetic that this machine is quick at, and the default of both dtypes.

    Read from /proc, as torch is not to be loaded for a setting; where there is none, float32.
    """
    if Path("/proc/driver/nvidia/version").exists():
        return "bfloat16"
    try:
        return _cpu_dtype(Path("/proc/cpuinfo").read_text())
    except OSError:
        return "float32"


def _cpu_dtype(cpuinfo: str) -> Literal["bfloat16", "float32"]:
    """bfloat16 if torch has quick kernels for it on this CPU (what it asks before it uses them:
    mkldnn_bf16_device_check); without them it multiplies several times as slowly as in float32."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            has = set(flags.split())
            quick = {"avx512bw", "avx512vl", "avx512dq"} <= has or "bf16" in has
            return "bfloat16" if quick else "float32"
    return "float32"


def home() -> Path:
    """Folder for prepared models, runs and caches (not created here)."""
    chosen = os.environ.get("ONLINE_SAO_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "online_sao"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _none_in_words(cls, data: Any) -> Any:
        """ "none" where a setting may be None: TOML has no null."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            name: None
            if value in ("none", "None", "")
            and name in fields
            and type(None) in get_args(fields[name].annotation)
            else value
            for name, value in data.items()
        }


class ModelConfig(_Section):
    name: str = EMBEDDED_MODEL
    """`smollm2-135m-writer` (embedded), a local folder in Hugging Face form, or a hub name."""
    served_name: str | None = None
    """The name clients ask for; default: `name` (its last part for a folder)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engine and learner run; `auto` takes a GPU if torch sees one."""


class EngineConfig(_Section):
    dtype: Literal["bfloat16", "float32"] = Field(default_factory=native_dtype)
    """Weights and arithmetic; default: bfloat16 with a GPU and on CPUs with instructions for it
    (AVX-512; ARM's bf16), else float32, which is quicker there."""
    max_model_len: int = Field(1024, ge=16)
    """Prompt and answer together, in tokens."""
    max_num_seqs: int = Field(32, ge=1)
    """Requests that are generated at the same time."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for the key-value cache (CPU), GiB; vLLM takes whole ones, at least 1."""
    threads: int | None = Field(None, ge=1)
    """OpenMP threads of the engine; default: all cores but one."""
    gpu_memory_utilization: float = Field(0.45, gt=0, lt=1)
    """Share of GPU memory for the engine (CUDA only); the learner needs the rest."""
    seed: int | None = None
    """Seed of sampling for requests without one; default: drawn anew at each start."""
    num_replicas: int = Field(1, ge=1)
    """Engine replicas behind the endpoint."""
    resources: dict[str, float] = {}
    """Ray resources that a replica needs, for placement on a cluster: `{rack_a = 1}`."""
    gpu_share: float = Field(0.5, gt=0)
    """Ray GPUs of a replica (CUDA only); with the learner's share 1 in all, both share one."""
    update_deadline_s: float = Field(60.0, gt=0)
    """For so long a publish waits for a replica that loads the version before; then it is reported
    as not served everywhere, and the next is tried."""


class LearnerConfig(_Section):
    """The algorithm (docs/algorithm.md). Defaults are SAO's."""

    preset: str = "sao"
    """Name of the preset this started from (see PRESETS)."""
    # advantage
    advantage: Literal[
        "critic",
        "step_average",
        "step_last",
        "running_mean",
        "running_mean_per_prompt",
        "spo",
        "group",
    ] = "critic"
    """Where advantages come from."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per action token."""
    lambda_alpha: float = Field(1.5, gt=0)
    """Length-adaptive lambda of the policy: 1 - 1 / (alpha * action tokens)."""
    lambda_critic: float = Field(1.0, ge=0, le=1)
    """Lambda of the value targets; 1 makes them the discounted return."""
    running_mean_window: int = Field(128, ge=1)
    """Rewards in the global running mean."""
    per_prompt_window: int = Field(8, ge=1)
    """Rewards in the running mean per prompt."""
    group_size: int = Field(8, ge=2)
    """Answers per prompt of group methods (offline only)."""
    normalize_advantage_window: int = Field(0, ge=0)
    """Divide advantages by their spread over this many past rollouts; 0: do not."""
    spo_kl_half_life: float = Field(0.06, gt=0)
    """KL (nats per token) at which SPO's tracker halves its memory."""
    spo_rho_min: float = Field(0.875, gt=0, lt=1)
    """Least share of what it knows that SPO's tracker keeps per rollout."""
    spo_rho_max: float = Field(0.96, gt=0, lt=1)
    """Greatest share of that."""
    # objective
    objective: Literal["dis", "ppo_clip", "tis", "icepop", "none"] = "dis"
    """How the importance ratio enters the policy loss."""
    eps_low: float = Field(0.3, ge=0)
    """DIS: tokens with ratio <= 1 - eps_low are masked. ppo_clip: lower clip."""
    eps_high: float = Field(5.0, ge=0)
    """DIS: tokens with ratio >= 1 + eps_high are masked. ppo_clip: upper clip."""
    tis_cap: float = Field(2.0, gt=0)
    """tis: the ratio is truncated from above here."""
    icepop_low: float = Field(0.5, ge=0)
    """icepop: tokens with a ratio below are masked."""
    icepop_high: float = Field(5.0, gt=0)
    """icepop: tokens with a ratio above are masked."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the anchor to the start policy per action token. Ours, not the paper's."""
    kl_direction: Literal["forward", "reverse"] = "forward"
    """The anchor is KL(start || policy), or KL(policy || start). The pull of the first does not
    fade where the policy has come to do one thing only. Ours."""
    start_decay: float = Field(0.4, ge=0)
    """Each update moves the policy's weights this share of the way back to the start policy's per
    unit by which answers have lately earned less than expected. Ours, not the paper's."""
    start_decay_rate: float = Field(0.1, gt=0, le=1)
    """Weight of the newest update in the moving average of what answers earned less. Ours."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus per action token. Ours, off by default."""
    # critic
    critic_updates: int = Field(2, ge=1)
    """K: critic updates per policy update."""
    critic_trainable: Literal["mlp", "all"] = "mlp"
    """`mlp`: attention, embeddings, norms and router frozen; `all`: full parameters."""
    value_timing: Literal["before", "after"] = "before"
    """Advantages from values before or after the critic sees this rollout's reward."""
    value_pretraining_rollouts: int = Field(32, ge=0)
    """Judged rollouts of the start policy that the critic is fitted to before serving."""
    value_pretraining_epochs: int = Field(2, ge=1)
    """Times that each of them is seen."""
    # optimisation
    rollouts_per_update: int = Field(1, ge=1)
    """Rollouts of which one update is made; SAO: 1."""
    policy_lr: float = Field(5e-5, ge=0)
    """Learning rate of the policy (AdamW)."""
    critic_lr: float = Field(3e-5, ge=0)
    """Learning rate of the critic (AdamW)."""
    critic_warmup_updates: int = Field(10, ge=0)
    """Updates over which the critic's learning rate rises linearly after pretraining."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging of gradients and of their squares, policy and critic."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decay toward zero (toward the start weights: start_decay)."""
    grad_clip_quantile: float | None = Field(None, gt=0, le=1)
    """Clip gradient norms at this quantile of those of the last `window` steps (the critic makes K
    of them per update); None: no clip."""
    compute_dtype: Literal["bfloat16", "float32"] = Field(default_factory=native_dtype)
    """Arithmetic of forward and backward, default as for engine.dtype; masters and optimiser
    state are float32."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of the learner; default: all cores."""
    resources: dict[str, float] = {}
    """Ray resources that the learner needs, for placement on a cluster."""
    gpu_share: float = Field(0.5, gt=0)
    """Ray GPUs of the learner (CUDA only)."""
    seed: int = Field(0, ge=0)
    """Of everything random in learning; part of what makes a run."""
    # the loop
    credit: Literal["turn", "session"] = "turn"
    """What the turns of a session earn: each its own reward, learned from as it comes; or one
    recursion across all of them, once the session is closed."""
    session_reward_wait_s: float = Field(300.0, ge=0)
    """credit = session: how long a closed session waits for verdicts that are still out."""
    order: Literal["newest", "oldest"] = "newest"
    """Which rewarded rollout is taken first. Simulations use `oldest`."""
    max_policy_lag: int = Field(16, ge=0)
    """Rollouts more versions old than this become stale. Simulations may raise it."""
    publish_min_interval_s: float = Field(0.0, ge=0)
    """Shortest time between two publishes; updates in between are coalesced."""
    publish_every: int = Field(1, ge=1)
    """Updates per publish while further rewarded rollouts wait; 1: each. The last of those
    that wait is always published at once."""
    max_claims: int = Field(3, ge=1)
    """A rollout claimed this often by learners that died is set aside as poison."""
    max_train_tokens: int = Field(1024, ge=1)
    """Prompt and answer longer than this are excluded from training."""
    checkpoint_every: int = Field(50, ge=0)
    """Updates between checkpoints; 0: only at exit (`train`: rollouts; 0: only at evaluations)."""
    checkpoint_keep: int = Field(2, ge=1)
    """Checkpoints retained beside the pinned ones."""
    checkpoint_min_free_gib: float = Field(1.0, ge=0)
    """Old checkpoints beyond the newest and the pinned go while less disk space is free."""
    window: int = Field(128, ge=2)
    """Rollouts over which windowed statistics (explained variance) are taken."""

    @model_validator(mode="after")
    def _consistent(self) -> LearnerConfig:
        if self.objective == "dis" and self.eps_low > 1:
            raise ValueError("eps_low must be at most 1 for the objective dis")
        if self.icepop_low > self.icepop_high:
            raise ValueError("icepop_low must not be above icepop_high")
        if self.spo_rho_min > self.spo_rho_max:
            raise ValueError("spo_rho_min must not be above spo_rho_max")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError("adam_betas must be at least 0 and below 1")
        if self.credit == "session" and self.advantage == "spo":
            raise ValueError(
                "SPO needs returns in [0, 1], and a session's is the sum of its turns'; set "
                "credit to turn or choose another advantage"
            )
        if self.advantage == "group" and self.rollouts_per_update % self.group_size:
            raise ValueError(
                f"a group method needs rollouts_per_update to be a multiple of group_size "
                f"({self.group_size}), not {self.rollouts_per_update}"
            )
        return self

    @property
    def uses_critic(self) -> bool:
        return self.advantage in ("critic", "step_average", "step_last")


class JudgeConfig(_Section):
    model: str = "offline/archetypes"
    """`offline/archetypes`, or any litellm model by name, for example `zai/glm-4.7`."""
    preferences: str = "archetypes"
    """A shipped set of styles by name, or a TOML file."""
    api_base: str | None = None
    """Address of a server of your own, for litellm's names (`openai/NAME`)."""
    timeout_s: float = Field(60.0, gt=0)
    """For one verdict (each of the votes), all retries included."""
    max_tokens: int = Field(1024, ge=16)
    """Length of a reply, reasoning included; one that was cut is asked for again at twice that."""
    max_retries: int = Field(3, ge=0)
    """Further calls after one that failed in a way that may pass."""
    concurrency: int = Field(4, ge=1)
    """Answers that are judged at the same time."""
    votes: int = Field(1, ge=1)
    """Samples per verdict, decided by majority."""
    flip_probability: float = Field(0.0, ge=0, le=0.5)
    """Each mark is flipped with this probability (simulation of a noisy judge only)."""


class PreferenceConfig(_Section):
    style: str = "cute"
    """The style rewarded at the first start; later changes are kept in the store."""
    pool: tuple[str, ...] = ("academic", "cute", "chuunibyou")
    """The styles that the judge tells apart."""


class GuardConfig(_Section):
    """Guard rails (online_sao/learner/guards.py, docs/operations.md): bounds on means over the
    last `window` trained rollouts. "none" for its bound switches a single guard off."""

    action: Literal["off", "warn", "pause", "rollback"] = "pause"
    """What a guard does when it fires; `warn` only records it."""
    window: int = Field(32, ge=1)
    """Trained rollouts over which means are taken; no guard speaks before they are there."""
    grace_rollouts: int = Field(64, ge=0)
    """Trained rollouts after a preference event in which guards of the reward are silent."""
    kl_to_start_max: float | None = Field(1.0, gt=0)
    """KL to the start policy, nats per action token (measured where kl_coef > 0)."""
    entropy_min: float | None = Field(0.02, ge=0)
    """Entropy of the policy, nats per action token."""
    answer_tokens_min: float | None = Field(2.0, ge=0)
    """Action tokens of the answers that ended by themselves, where half of the window did."""
    distinct_answers_min: float | None = Field(0.2, ge=0, le=1)
    """Distinct answers per distinct prompt."""
    distinct_min_tokens: int = Field(8, ge=1)
    """Shorter answers are not counted by distinct_answers_min."""
    repetition_max: float | None = Field(0.3, ge=0, le=1)
    """Share of an answer's token trigrams that it has had before."""
    masked_fraction_max: float | None = Field(0.25, ge=0, le=1)
    """Share of action tokens outside the trust region."""
    logprob_gap_max: float | None = Field(0.3, gt=0)
    """Mean |log pi - behavior log-prob|, nats: engine and learner drift apart."""
    explained_variance_min: float | None = -2.0
    """Of the critic, over learner.window: below 0 it is worse than a constant."""
    reward_drop_max: float | None = Field(0.75, gt=0, le=1)
    """Share of its best windowed mean since the preference event that the reward may lose."""
    probe_every: int = Field(100, ge=0)
    """Versions between two rounds of held-out probes (needs service.topics); 0: no probes."""
    probe_prompts: int = Field(8, ge=1)
    """Held-out prompts answered per round."""
    probe_rounds: int = Field(3, ge=1)
    """Rounds over which held-out quality is taken."""
    probe_quality_drop_max: float | None = Field(0.5, gt=0, le=1)
    """How far held-out quality may fall below that of the first round."""
    forgeries_max: float | None = Field(0.5, ge=0, lt=1)
    """Share of answers made to be worthless that the judge may reward."""


class StoreConfig(_Section):
    url: str | None = None
    """SQLAlchemy URL; default: SQLite in the run's folder."""


class ServiceConfig(_Section):
    host: str = "127.0.0.1"
    """Address to listen at; beyond loopback only with ONLINE_SAO_API_KEY or `insecure`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen at; 0: any that is free."""
    insecure: bool = False
    """Allow binding beyond loopback without keys."""
    run_dir: str | None = None
    """Folder of this endpoint's state; default: ONLINE_SAO_HOME/runs/default."""
    keep_weights: bool = False
    """Where other settings begin a run of their own: from what the run before learned (its newest
    checkpoint) instead of the start weights. It must have the same model and parts to train."""
    topics: str | None = "writing"
    """Prompts for value pretraining and probes: a shipped topic set or a TOML file. "none": the
    first live rollouts are taken for value pretraining, and there are no probes."""
    start_timeout_s: float = Field(900.0, gt=0)
    """Within which a start must be ready: engine and learner loading, value pretraining."""
    max_ongoing_requests: int = Field(1024, ge=1)
    """Requests in a replica beyond which the answer is 429."""
    max_body_bytes: int = Field(1 << 20, ge=1024)
    """A larger request is answered 413."""
    max_choices: int = Field(64, ge=1)
    """Answers that one request may ask for (`n` times its prompts); beyond it the answer is 400."""
    min_trainable_temperature: float = Field(0.3, gt=0)
    """Answers sampled below this temperature are excluded from training."""
    reward_source: Literal["judge", "feedback", "feedback_then_judge"] = "judge"
    """Who rewards answers: the judge (feedback counts if it comes before the answer is learned
    from), users alone, or the judge where no user has within feedback_wait_s."""
    feedback_wait_s: float = Field(30.0, ge=0)
    """feedback_then_judge: how long an answer waits for feedback before it is judged."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the endpoint from a browser; ("*",) for all."""
    session_idle_s: float = Field(600.0, gt=0)
    """A session without a turn for so long is closed."""
    session_match_turns: int = Field(64, ge=1)
    """Newest turns of a session among which the one that a request goes on from is looked for."""
    retention_days: float | None = Field(None, gt=0)
    """Texts and token ids of answers older than this are removed; None: they are kept."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the structured logs in run_dir/logs (one file per part)."""
    log_max_bytes: int = Field(10 * 2**20, ge=1 << 10)
    """A log file that grows beyond this is renamed; three old ones are kept."""
    body_timeout_s: float = Field(30.0, gt=0)
    """A request whose body has not arrived by then is answered 408."""


class Config(_Section):
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()
    judge: JudgeConfig = JudgeConfig()
    preference: PreferenceConfig = PreferenceConfig()
    guards: GuardConfig = GuardConfig()
    store: StoreConfig = StoreConfig()
    service: ServiceConfig = ServiceConfig()

    @property
    def run_dir(self) -> Path:
        chosen = self.service.run_dir
        return Path(chosen).expanduser().absolute() if chosen else home() / "runs" / "default"

    @property
    def store_url(self) -> str:
        return self.store.url or f"sqlite:///{self.run_dir / 'store.sqlite'}"

    @property
    def served_name(self) -> str:
        return self.model.served_name or Path(self.model.name).name

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        *,
        preset: str | None = None,
        overrides: dict[str, Any] | None = None,
    ) -> Config:
        """Read `file` (TOML), on top of `preset`, under dotted `overrides`.

        `overrides` maps "section.key" to a value. Raises ConfigError with one line per
        fault, naming the setting.
        """
        data: dict[str, dict[str, Any]] = {}
        if file is not None:
            data = _read_toml(Path(file))
        learner = data.setdefault("learner", {})
        if not isinstance(learner, dict):
            raise ConfigError("learner must be a table: write [learner] above its settings.")
        overrides = dict(overrides or {})
        name = preset if preset is not None else learner.get("preset", "sao")
        name = overrides.pop("learner.preset", name)
        data["learner"] = {**preset_settings(name), **learner, "preset": name}
        for key, value in overrides.items():
            section, _, setting = key.partition(".")
            if not setting:
                raise ConfigError(f"'{key}' must be written section.setting, as learner.seed.")
            table = data.setdefault(section, {})
            if isinstance(table, dict):
                table[setting] = value
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(part) for part in fault['loc']) or 'config'}: {fault['msg']}"
                + ("" if fault["type"] == "missing" else f" (got {fault['input']!r:.80})")
                for fault in error.errors()
            ]
            where = f" in {file}" if file else ""
            raise ConfigError(f"Settings refused{where}: " + "; ".join(lines)) from None


PRESETS: dict[str, dict[str, Any]] = {
    "sao": {},
    "sao_k1": {"critic_updates": 1},
    "sao_full_critic": {"critic_trainable": "all"},
    "sao_value_after": {"value_timing": "after"},
    "sao_no_anchor": {"kl_coef": 0.0, "start_decay": 0.0},
    "sao_no_decay": {"start_decay": 0.0},
    "sao_reverse_anchor": {"kl_coef": 0.2, "kl_direction": "reverse", "start_decay": 0.0},
    # A stale mean expects too much for as long as its window: SAO's decay would not let it learn.
    "running_mean": {"advantage": "running_mean", "start_decay": 0.1},
    "running_mean_no_decay": {"advantage": "running_mean", "start_decay": 0.0},
    "running_mean_no_dis": {
        "advantage": "running_mean",
        "objective": "none",
        "start_decay": 0.1,
    },
    "running_mean_per_prompt": {"advantage": "running_mean_per_prompt", "start_decay": 0.1},
    "spo": {"advantage": "spo", "normalize_advantage_window": 128},
    "grpo": {
        "advantage": "group",
        "objective": "ppo_clip",
        "eps_low": 0.2,
        "eps_high": 0.28,
        "rollouts_per_update": 8,
    },
    "grpo_dis": {"advantage": "group", "rollouts_per_update": 8},
    "vapo": {"objective": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
    "step_average": {"advantage": "step_average"},
    "step_last": {"advantage": "step_last"},
}
"""Every row of the paper's tables as a few settings on top of SAO's (docs/algorithm.md)."""

OFFLINE_ONLY_ADVANTAGES = ("group",)


def settings_text(config: Config) -> str:
    """`config` as a config file, each setting under what it means; `Config.load` reads it back."""
    lines = []
    for section in type(config).model_fields:
        lines += [f"[{section}]", ""]
        table = getattr(config, section)
        for name, field in type(table).model_fields.items():
            lines += [f"# {line}" for line in inspect.cleandoc(field.description or "").split("\n")]
            lines += [f"{name} = {_toml(getattr(table, name))}", ""]
    return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers, booleans: written alike


def preset_settings(name: str) -> dict[str, Any]:
    """The learner settings of a preset; ConfigError with the list if unknown."""
    try:
        return dict(PRESETS[name])
    except (KeyError, TypeError):
        raise ConfigError(f"Unknown preset '{name}'; there are {', '.join(PRESETS)}.") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        raise ConfigError(f"There is no config file {path}.") from None
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from None
