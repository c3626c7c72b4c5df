"""Settings: what is refused, in which words, and which source wins."""

import re
from pathlib import Path

import pytest

from online_sao.config import (
    EMBEDDED_MODEL,
    OFFLINE_ONLY_ADVANTAGES,
    PRESETS,
    Config,
    LearnerConfig,
    _cpu_dtype,
    home,
    native_dtype,
    preset_settings,
    settings_text,
)
from online_sao.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def written(text: str | bytes) -> Path:
        file = tmp_path / "config.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return written


def refused(**arguments) -> str:
    """The one line that ConfigError says."""
    with pytest.raises(ConfigError) as error:
        Config.load(**arguments)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


class TestDefaults:
    """DESIGN.md section 4."""

    def test_the_method(self):
        learner = Config.load().learner
        assert learner.preset == "sao"
        assert (learner.advantage, learner.objective) == ("critic", "dis")
        assert (learner.eps_low, learner.eps_high) == (0.3, 5.0)
        assert (learner.gamma, learner.lambda_alpha, learner.lambda_critic) == (1.0, 1.5, 1.0)
        assert (learner.critic_updates, learner.critic_trainable) == (2, "mlp")
        assert learner.value_timing == "before"
        assert (learner.rollouts_per_update, learner.kl_coef) == (1, 0.05)
        assert learner.kl_direction == "forward"
        assert (learner.start_decay, learner.start_decay_rate) == (0.4, 0.1)
        assert (learner.policy_lr, learner.critic_lr) == (5e-5, 3e-5)
        assert (learner.adam_betas, learner.weight_decay) == ((0.9, 0.95), 0.0)
        assert learner.grad_clip_quantile is None
        assert (learner.value_pretraining_rollouts, learner.critic_warmup_updates) == (32, 10)
        assert (learner.order, learner.max_policy_lag) == ("newest", 16)
        assert learner.publish_min_interval_s == 0

    def test_every_setting_has_a_default_and_bounds_hold_for_it(self):
        assert Config() == Config.load() == Config.model_validate(Config().model_dump())

    def test_where_things_are_kept(self, isolated_home):
        config = Config.load()
        assert config.run_dir == isolated_home / "runs" / "default"
        assert config.store_url == f"sqlite:///{config.run_dir}/store.sqlite"
        assert config.served_name == EMBEDDED_MODEL

    def test_settings_cannot_be_changed_afterwards(self):
        with pytest.raises(ValueError, match="frozen"):
            Config.load().learner.policy_lr = 1.0


class TestArithmetic:
    """A CPU without instructions for bfloat16 is an order of magnitude slower in it."""

    @pytest.mark.parametrize(
        ("cpuinfo", "dtype"),
        [
            ("model name\t: x\nflags\t\t: fpu avx512f avx512dq avx512bw avx512vl\n", "bfloat16"),
            ("flags\t\t: fpu fma avx avx2\n", "float32"),
            ("flags\t\t: fpu avx512f avx512bw\n", "float32"),  # torch wants dq and vl as well
            ("Features\t: fp asimd bf16 sve\n", "bfloat16"),
            ("Features\t: fp asimd\n", "float32"),
            ("processor\t: 0\n", "float32"),
            ("", "float32"),
        ],
    )
    def test_of_a_cpu(self, cpuinfo, dtype):
        assert _cpu_dtype(cpuinfo) == dtype

    def test_it_is_what_torch_says_of_this_one(self):
        import torch

        quick = torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.cuda.is_available()
        assert native_dtype() == ("bfloat16" if quick else "float32")

    def test_it_is_the_default_of_both_and_can_be_chosen(self):
        config = Config.load()
        assert {config.engine.dtype, config.learner.compute_dtype} == {native_dtype()}
        for dtype in ("bfloat16", "float32"):
            overrides = {"engine.dtype": dtype, "learner.compute_dtype": dtype}
            config = Config.load(overrides=overrides)
            assert {config.engine.dtype, config.learner.compute_dtype} == {dtype}


class TestPaths:
    def test_home_is_the_environments(self, monkeypatch, tmp_path):
        monkeypatch.setenv("ONLINE_SAO_HOME", str(tmp_path / "there"))
        assert home() == tmp_path / "there"
        assert not home().exists()  # nothing is made by asking
        monkeypatch.setenv("ONLINE_SAO_HOME", "~/somewhere")
        assert home() == Path.home() / "somewhere"
        monkeypatch.setenv("ONLINE_SAO_HOME", "relative")
        assert home() == Path.cwd() / "relative"

    def test_else_the_cache_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("ONLINE_SAO_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert home() == tmp_path / "online_sao"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert home() == Path.home() / ".cache" / "online_sao"
        monkeypatch.setenv("ONLINE_SAO_HOME", "")  # set, but empty: not the current folder
        assert home() == Path.home() / ".cache" / "online_sao"

    def test_chosen_places(self, tmp_path):
        config = Config.load(
            overrides={
                "service.run_dir": str(tmp_path / "run"),
                "store.url": "postgresql://host/name",
                "model.name": "/models/of/mine/",
            }
        )
        assert config.run_dir == tmp_path / "run"
        assert config.store_url == "postgresql://host/name"
        assert config.served_name == "mine"
        named = Config.load(overrides={"model.name": "a/b", "model.served_name": "writer"})
        assert named.served_name == "writer"
        assert Config.load(overrides={"model.name": "owner/model"}).served_name == "model"


class TestPrecedence:
    def test_override_before_file_before_preset_before_default(self, write):
        file = write('[learner]\npreset = "vapo"\neps_low = 0.4\npolicy_lr = 3e-4\n')
        learner = Config.load(file, overrides={"learner.policy_lr": 5e-4}).learner
        assert learner.policy_lr == 5e-4  # override
        assert learner.eps_low == 0.4  # file
        assert learner.eps_high == 0.28  # preset
        assert learner.objective == "ppo_clip"  # preset
        assert learner.gamma == 1.0  # default
        assert learner.preset == "vapo"

    def test_the_named_preset_stands_in_for_the_files(self, write):
        file = write('[learner]\npreset = "vapo"\n')
        learner = Config.load(file, preset="sao_k1").learner
        assert (learner.preset, learner.objective, learner.critic_updates) == ("sao_k1", "dis", 1)

    def test_sections_of_a_file(self, write):
        file = write(
            '[model]\nname = "owner/model"\n[engine]\nmax_num_seqs = 3\n'
            '[preference]\nstyle = "classical"\npool = ["classical", "cute"]\n'
            "[service]\nport = 0\n"
        )
        config = Config.load(file)
        assert config.model.name == "owner/model"
        assert config.engine.max_num_seqs == 3
        assert config.preference.pool == ("classical", "cute")
        assert config.service.port == 0
        assert config.learner == LearnerConfig()

    def test_an_empty_file_is_the_defaults(self, write):
        assert Config.load(write("")) == Config()
        assert Config.load(str(write(""))) == Config()

    def test_what_is_dumped_is_loaded_again(self):
        config = Config.load(preset="grpo", overrides={"learner.seed": 7})
        assert Config.model_validate(config.model_dump(mode="json")) == config


class TestRefused:
    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("learner.gamma", 1.01),
            ("learner.gamma", -0.1),
            ("learner.lambda_alpha", 0),
            ("learner.eps_low", -0.1),
            ("learner.eps_low", 1.5),
            ("learner.policy_lr", -1e-5),
            ("learner.policy_lr", float("nan")),
            ("learner.policy_lr", float("inf")),
            ("learner.policy_lr", "fast"),
            ("learner.kl_coef", -1),
            ("learner.start_decay", -0.1),
            ("learner.start_decay_rate", 0),
            ("learner.start_decay_rate", 1.1),
            ("learner.critic_updates", 0),
            ("learner.critic_updates", 1.5),
            ("learner.critic_trainable", "attention"),
            ("learner.value_timing", "during"),
            ("learner.advantage", "guess"),
            ("learner.objective", "reinforce"),
            ("learner.rollouts_per_update", 0),
            ("learner.grad_clip_quantile", 0),
            ("learner.grad_clip_quantile", 1.1),
            ("learner.window", 1),
            ("learner.group_size", 1),
            ("learner.normalize_advantage_window", -1),
            ("learner.spo_rho_min", 1.0),
            ("learner.spo_rho_min", 0.97),  # above spo_rho_max
            ("learner.icepop_low", 6.0),  # above icepop_high
            ("learner.adam_betas", [0.9, 1.0]),
            ("learner.adam_betas", [-0.1, 0.9]),
            ("learner.adam_betas", [0.9]),
            ("learner.max_policy_lag", -1),
            ("learner.order", "random"),
            ("learner.checkpoint_keep", 0),
            ("learner.compute_dtype", "float16"),
            ("learner.max_claims", 0),
            ("learner.no_such_setting", 1),
            ("engine.dtype", "int8"),
            ("engine.gpu_memory_utilization", 1.0),
            ("engine.num_replicas", 0),
            ("model.device", "tpu"),
            ("judge.flip_probability", 0.6),
            ("judge.votes", 0),
            ("service.port", 70000),
            ("service.reward_source", "dice"),
            ("service.max_body_bytes", 10),
            ("preference.pool", "cute"),
            ("no_such_section.key", 1),
        ],
    )
    def test_the_message_names_the_setting(self, setting, value):
        message = refused(overrides={setting: value})
        name = setting.split(".")[0] if setting.startswith("no_such") else setting.split(".")[1]
        assert re.search(rf"\b{name}\b", message), message
        assert message.startswith("Settings refused: ")

    def test_all_faults_are_told_at_once(self, write):
        file = write("[learner]\ngamma = 2\nseed = 'x'\n[engine]\nmax_num_seqs = 0\n")
        message = refused(file=file)
        assert message.startswith(f"Settings refused in {file}: ")
        for name in ("learner.gamma", "learner.seed", "engine.max_num_seqs"):
            assert f"{name}: " in message
        assert "(got 2)" in message
        assert "(got 'x')" in message

    @pytest.mark.parametrize("bound", [0.0, 1.0])
    def test_bounds_are_inside_where_they_are_closed(self, bound):
        assert Config.load(overrides={"learner.gamma": bound}).learner.gamma == bound
        assert Config.load(overrides={"learner.eps_low": bound}).learner.eps_low == bound

    def test_a_wide_lower_bound_is_for_dis_alone(self):
        message = refused(overrides={"learner.eps_low": 1.5})
        assert "eps_low must be at most 1 for the objective dis" in message
        Config.load(preset="vapo", overrides={"learner.eps_low": 1.5})

    def test_a_group_must_fit_into_the_updates(self):
        """C5: one rollout per update normalised by itself would never teach anything."""
        message = refused(preset="grpo", overrides={"learner.rollouts_per_update": 1})
        assert "multiple of group_size (8), not 1" in message
        message = refused(preset="grpo", overrides={"learner.group_size": 3})
        assert "multiple of group_size (3), not 8" in message
        Config.load(
            preset="grpo",
            overrides={"learner.rollouts_per_update": 6, "learner.group_size": 3},
        )

    @pytest.mark.parametrize("name", ["nope", "", "SAO", 3, ["sao"]])
    def test_an_unknown_preset(self, name, write):
        for message in (
            refused(preset=name),
            refused(file=write(f"[learner]\npreset = {name!r}\n")),
        ):
            assert f"Unknown preset '{name}'" in message
            assert "running_mean_per_prompt" in message  # lists what there is

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("[learner", "is not valid TOML"),
            ("learner = 3", "learner must be a table"),
            ("model = 3", "model: "),
            ("gamma = 0.5", "gamma: "),  # a setting outside its table
            ('[learner]\npreset = "nope"', "Unknown preset 'nope'"),
            (b"name = '\xff'", "is not valid TOML"),
            ("[learner]\npolicy_lr = inf", "learner.policy_lr"),
            ("[learner]\npolicy_lr = nan", "learner.policy_lr"),
        ],
    )
    def test_a_file_that_is_not_understood(self, write, text, says):
        assert says in refused(file=write(text))

    def test_a_file_that_is_not_there(self, tmp_path):
        assert refused(file=tmp_path / "no.toml") == f"There is no config file {tmp_path}/no.toml."

    def test_a_folder_for_a_file(self, tmp_path):
        assert "cannot be read" in refused(file=tmp_path)

    @pytest.mark.parametrize("key", ["seed", "learner", ""])
    def test_an_override_without_its_section(self, key):
        assert f"'{key}' must be written section.setting" in refused(overrides={key: 1})


class TestPresets:
    def test_there_is_one_for_every_row_of_the_papers_tables(self):
        assert set(PRESETS) == {
            "sao",
            "sao_k1",
            "sao_full_critic",
            "sao_value_after",
            "sao_no_anchor",
            "sao_no_decay",
            "sao_reverse_anchor",
            "running_mean",
            "running_mean_no_decay",
            "running_mean_no_dis",
            "running_mean_per_prompt",
            "spo",
            "grpo",
            "grpo_dis",
            "vapo",
            "step_average",
            "step_last",
        }

    @pytest.mark.parametrize("name", PRESETS)
    def test_each_can_be_loaded_and_says_its_name(self, name):
        learner = Config.load(preset=name).learner
        assert learner.preset == name
        for setting, value in PRESETS[name].items():
            assert getattr(learner, setting) == value

    @pytest.mark.parametrize(
        ("name", "differs"),
        [
            ("sao_k1", {"critic_updates"}),
            ("sao_full_critic", {"critic_trainable"}),
            ("sao_value_after", {"value_timing"}),
            ("sao_no_anchor", {"kl_coef", "start_decay"}),
            ("sao_no_decay", {"start_decay"}),
            ("sao_reverse_anchor", {"kl_coef", "kl_direction", "start_decay"}),
            ("running_mean", {"advantage", "start_decay"}),
            ("running_mean_no_decay", {"advantage", "start_decay"}),
            ("running_mean_no_dis", {"advantage", "objective", "start_decay"}),
            ("vapo", {"objective", "eps_low", "eps_high"}),
            ("step_average", {"advantage"}),
        ],
    )
    def test_each_differs_from_sao_in_what_its_name_says_alone(self, name, differs):
        sao = Config.load().learner.model_dump(exclude={"preset"})
        other = Config.load(preset=name).learner.model_dump(exclude={"preset"})
        assert {key for key in sao if sao[key] != other[key]} == differs

    def test_which_need_a_critic(self):
        with_critic = {name for name in PRESETS if Config.load(preset=name).learner.uses_critic}
        assert with_critic == {
            "sao",
            "sao_k1",
            "sao_full_critic",
            "sao_value_after",
            "sao_no_anchor",
            "sao_no_decay",
            "sao_reverse_anchor",
            "vapo",
            "step_average",
            "step_last",
        }

    def test_which_are_for_the_offline_runner_only(self):
        offline = {
            name
            for name in PRESETS
            if Config.load(preset=name).learner.advantage in OFFLINE_ONLY_ADVANTAGES
        }
        assert offline == {"grpo", "grpo_dis"}

    def test_settings_are_a_copy(self):
        preset_settings("vapo")["eps_low"] = 9
        assert PRESETS["vapo"]["eps_low"] == 0.2


def test_a_preset_among_the_overrides_is_the_preset():
    config = Config.load(overrides={"learner.preset": "running_mean"})
    assert (config.learner.preset, config.learner.advantage) == ("running_mean", "running_mean")
    with pytest.raises(ConfigError, match="Unknown preset 'nonsense'"):
        Config.load(overrides={"learner.preset": "nonsense"})


def test_none_in_words():
    assert Config.load(overrides={"service.topics": "none"}).service.topics is None
    assert Config.load().service.topics == "writing"
    assert Config.load(overrides={"guards.entropy_min": "none"}).guards.entropy_min is None
    assert "learner.seed" in refused(overrides={"learner.seed": "none"})  # must be a number
    assert Config.load(overrides={"model.name": "none"}).model.name == "none"


class TestSettingsText:
    @pytest.mark.parametrize(
        "overrides",
        [
            {},
            {"service.topics": "none", "guards.entropy_min": "none", "learner.threads": 3},
            {"engine.resources": {"rack a": 1.5}, "service.cors_origins": ["http://a", 'b"\\']},
            {"learner.preset": "spo", "service.insecure": True, "service.run_dir": "/tmp/ä 🐈"},
        ],
    )
    def test_it_is_read_back_as_what_was_written(self, write, overrides):
        config = Config.load(overrides=overrides)
        assert Config.load(write(settings_text(config))) == config

    def test_every_setting_is_explained(self):
        for section in Config.model_fields:
            for name, field in type(getattr(Config(), section)).model_fields.items():
                assert len(field.description or "") > 15, f"{section}.{name}"
