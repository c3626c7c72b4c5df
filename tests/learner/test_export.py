"""A version as a model folder: what transformers loads from it is what was served."""

import pytest
import torch
from learning import make_learner, make_rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from online_sao.cli import main
from online_sao.config import Config
from online_sao.errors import CheckpointError, ModelError, NotFoundError
from online_sao.learner.checkpoint import save_checkpoint
from online_sao.learner.export import export_version
from online_sao.learner.loop import make_run
from online_sao.prepare import model_hash
from online_sao.store import RolloutStore
from online_sao.types import WeightVersion


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def kept(run_dir, tiny_model):
    """Versions 1 and 2 of a run are retained; (store, weights by version)."""
    settings = {"model.name": str(tiny_model), "service.run_dir": str(run_dir)}
    config = Config.load(overrides={**settings, "engine.dtype": "bfloat16"})
    run = make_run(config, model_hash(tiny_model))
    learner = make_learner(tiny_model)
    weights = {}
    with RolloutStore(config.store_url) as store:
        store.start_run(run)
        for version in (1, 2):
            learner.update([[make_rollout(reward=1.0)]])
            store.add_version(WeightVersion(version, version - 1, run.id, "update"))
            path = save_checkpoint(run_dir / "checkpoints", learner, version, run.id)
            store.set_checkpoint(version, str(path))
            weights[version] = learner.policy.weights(torch.bfloat16)
        yield store, weights


@pytest.mark.parametrize(("asked", "given"), [(None, 2), (1, 1)])
def test_the_folder_holds_the_weights_that_were_served(kept, tmp_path, asked, given):
    store, weights = kept
    assert export_version(store, tmp_path / "out", asked) == given
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    found = dict(model.named_parameters())
    assert found.keys() == weights[given].keys()
    for name, tensor in weights[given].items():
        assert torch.equal(found[name], tensor), name
    other = weights[3 - given]
    assert any(not torch.equal(found[name], other[name]) for name in found)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_version_that_is_not_retained(kept, tmp_path):
    with pytest.raises(NotFoundError, match="Version 7 has no retained checkpoint; retained: 2, 1"):
        export_version(kept[0], tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(kept, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ModelError, match="is there already"):
        export_version(kept[0], tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_damaged_checkpoint(kept, tmp_path, run_dir):
    file = run_dir / "checkpoints" / "v2" / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="damaged"):
        export_version(kept[0], tmp_path / "out")


def test_a_start_model_that_has_changed(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("online_sao.learner.export.model_hash", lambda _: "other")
    with pytest.raises(ModelError, match="has changed"):
        export_version(kept[0], tmp_path / "out")


def test_the_command(kept, tmp_path, run_dir, capsys):
    assert main(["export", str(tmp_path / "out"), "--run-dir", str(run_dir)]) == 0
    assert "version 2 written" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "two"), "--run-dir", str(tmp_path)]) == 2
    assert "holds no store" in capsys.readouterr().err
