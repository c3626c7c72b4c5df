"""Checkpoints: all or nothing, in both directions."""

import json
import resource
import shutil
from unittest import mock

import pytest
import torch
from learning import changed, everything, make_learner, make_rollout, save_model

from online_sao.errors import CheckpointError
from online_sao.learner.checkpoint import (
    STATE_FILE,
    list_checkpoints,
    load_checkpoint,
    make_room,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)

FILES = {
    "state.json",
    "policy.safetensors",
    "policy_optimizer.safetensors",
    "critic.safetensors",
    "critic_optimizer.safetensors",
}


def train(learner, number, start=0):
    for step in range(start, start + number):
        rollout = make_rollout(tokens=[60 + step, 2, 3], reward=float(step % 2))
        assert learner.update([[rollout]]).applied


@pytest.fixture(scope="module")
def trained(tiny_model):
    learner = make_learner(tiny_model)
    train(learner, 3)
    return learner


@pytest.fixture
def saved(trained, tmp_path):
    return save_checkpoint(tmp_path / "checkpoints", trained, 7, "run")


class TestRoundTrip:
    @pytest.mark.parametrize(
        ("preset", "changes"),
        [
            ("sao", {}),
            ("sao", {"compute_dtype": "bfloat16", "grad_clip_quantile": 0.5, "weight_decay": 0.1}),
            ("sao_full_critic", {"critic_warmup_updates": 8}),
            ("spo", {}),
            ("running_mean_per_prompt", {}),
        ],
    )
    def test_the_continuation_is_the_same_to_the_last_bit(
        self, tiny_model, tmp_path, preset, changes
    ):
        straight = make_learner(tiny_model, preset, **changes)
        train(straight, 4)
        torch.rand(5)  # the random state is no longer that of a new learner
        path = save_checkpoint(tmp_path, straight, 4, "run")
        drawn = torch.rand(3)
        train(straight, 4, start=4)
        resumed = make_learner(tiny_model, preset, **changes)
        train(resumed, 1, start=9)  # whatever it was before
        assert load_checkpoint(path, resumed) == 4
        assert torch.equal(torch.rand(3), drawn)
        assert resumed.num_updates == 4
        train(resumed, 4, start=4)
        assert changed(everything(straight), everything(resumed)) == set()
        assert straight.state_dict() == resumed.state_dict()

    def test_before_the_first_update(self, tiny_model, tmp_path, trained):
        start = make_learner(tiny_model)
        path = save_checkpoint(tmp_path, start, 0, "run")
        other = make_learner(tiny_model)
        train(other, 2)
        load_checkpoint(path, other)
        assert changed(everything(start), everything(other)) == set()

    def test_saving_changes_nothing(self, tiny_model, tmp_path):
        learner = make_learner(tiny_model)
        train(learner, 1)
        before = everything(learner)
        save_checkpoint(tmp_path, learner, 1, "run")
        assert changed(before, everything(learner)) == set()

    def test_what_is_written(self, saved):
        assert saved.name == "v7"
        assert {file.name for file in saved.iterdir()} == FILES
        assert [path.name for path in saved.parent.iterdir()] == ["v7"]
        state = read_state(saved)
        assert (state["version"], state["run_id"]) == (7, "run")
        assert set(state["files"]) == FILES - {"state.json"}
        # no pickle anywhere: every file is JSON or safetensors
        for name in FILES - {"state.json"}:
            header = (saved / name).read_bytes()
            size = int.from_bytes(header[:8], "little")
            assert json.loads(header[8 : 8 + size])

    def test_written_again_it_replaces_the_former(self, saved, trained, tiny_model):
        other = make_learner(tiny_model)
        save_checkpoint(saved.parent, other, 7, "run")
        load_checkpoint(saved, other)
        assert other.num_updates == 0
        assert [path.name for path in saved.parent.iterdir()] == ["v7"]


class TestDamage:
    """A learner that cannot load is as it was, and the message says what is wrong."""

    def refused(self, path, model, says, preset="sao", **changes):
        learner = make_learner(model, preset, **changes)
        train(learner, 1, start=5)
        before, state, rng = everything(learner), learner.state_dict(), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=says) as error:
            load_checkpoint(path, learner)
        assert len(str(error.value).splitlines()) == 1
        assert changed(before, everything(learner)) == set()
        assert learner.state_dict() == state
        assert torch.equal(torch.get_rng_state(), rng)

    @pytest.mark.parametrize("name", sorted(FILES))
    @pytest.mark.parametrize("damage", ["cut", "empty", "byte", "missing"])
    def test_of_any_file(self, saved, tiny_model, name, damage):
        file = saved / name
        data = bytearray(file.read_bytes())
        if damage == "missing":
            file.unlink()
        elif damage == "byte":
            # in state.json a digit of a number: it stays valid JSON
            place = data.index(b'"num_updates": 3') + 15 if name == STATE_FILE else len(data) // 2
            data[place] ^= 0x01
            file.write_bytes(data)
        else:
            file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
        says = {
            "cut": "damaged|cannot be read",
            "empty": "damaged|cannot be read",
            "byte": "damaged",
            "missing": "cannot be read|no state.json",
        }[damage]
        self.refused(saved, tiny_model, says)

    def test_a_folder_that_is_not_there(self, tmp_path, tiny_model):
        self.refused(tmp_path / "v9", tiny_model, "is not a checkpoint: it has no state.json")

    @pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1}', '{"format": 99}', "null"])
    def test_a_state_that_is_not_ours(self, saved, tiny_model, text):
        (saved / STATE_FILE).write_text(text)
        self.refused(saved, tiny_model, "format that this program cannot read|damaged")

    def test_another_model(self, saved, tmp_path):
        other = save_model("llama", tmp_path / "llama")
        self.refused(saved, other, "another model or preset")

    def test_another_architecture(self, saved, tmp_path):
        other = save_model("qwen3", tmp_path / "qwen3")
        self.refused(saved, other, "another model or preset")

    @pytest.mark.parametrize("preset", ["running_mean", "sao_full_critic"])
    def test_another_preset(self, saved, tiny_model, preset):
        self.refused(saved, tiny_model, "another model or preset", preset)

    def test_another_estimator_of_the_same_model(self, tiny_model, tmp_path):
        learner = make_learner(tiny_model, "running_mean")
        train(learner, 1)
        path = save_checkpoint(tmp_path, learner, 1, "run")
        self.refused(path, tiny_model, "another preset", "spo")


class TestNoSpace:
    def test_too_little_is_free(self, tmp_path, trained, monkeypatch):
        need = sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in everything(trained).items()
            if "model" not in name.split(".")[0]
        )

        def free(number):
            usage = shutil.disk_usage("/")
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=number))

        free(int(need * 1.2) - 1)
        with pytest.raises(CheckpointError, match=r"GiB free; learning goes on without it"):
            save_checkpoint(tmp_path / "c", trained, 1, "run")
        assert list((tmp_path / "c").iterdir()) == []
        free(int(need * 1.2) + 1)
        assert save_checkpoint(tmp_path / "c", trained, 1, "run").is_dir()

    def test_it_runs_out_while_writing(self, tmp_path, trained):
        """The kernel refuses the write, as it does on a full disk."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match="version 3 cannot be written") as error:
                save_checkpoint(tmp_path, trained, 3, "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "too large" in str(error.value)
        assert list(tmp_path.iterdir()) == []
        assert save_checkpoint(tmp_path, trained, 3, "run").is_dir()

    def test_a_failed_write_leaves_the_former_checkpoint(self, saved, trained, tiny_model):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError):
                save_checkpoint(saved.parent, trained, 7, "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert load_checkpoint(saved, make_learner(tiny_model)) == 7

    def test_a_folder_that_cannot_be_made(self, trained, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
            save_checkpoint(tmp_path / "file" / "checkpoints", trained, 1, "run")


class TestFolder:
    def make(self, folder, *versions):
        for version in versions:
            (folder / f"v{version}").mkdir(parents=True)
            (folder / f"v{version}" / STATE_FILE).write_text("{}")

    def test_lists_the_newest_first_by_number(self, tmp_path):
        self.make(tmp_path, 9, 100, 20)
        (tmp_path / "v7").mkdir()  # without a state: not a checkpoint
        (tmp_path / "view").mkdir()
        (tmp_path / ".v8.partial").mkdir()
        assert list_checkpoints(tmp_path) == [
            (100, tmp_path / "v100"),
            (20, tmp_path / "v20"),
            (9, tmp_path / "v9"),
        ]
        assert list_checkpoints(tmp_path / "nowhere") == []

    @pytest.mark.parametrize(
        ("keep", "pinned", "removed"),
        [
            (2, set(), [3, 2, 1]),
            (2, {1, 5}, [3, 2]),
            (1, {2, 99}, [4, 3, 1]),
            (9, set(), []),
        ],
    )
    def test_pruning_keeps_the_newest_and_the_pinned(self, tmp_path, keep, pinned, removed):
        self.make(tmp_path, 1, 2, 3, 4, 5)
        assert prune_checkpoints(tmp_path, keep, pinned) == removed
        assert {v for v, _ in list_checkpoints(tmp_path)} == {1, 2, 3, 4, 5} - set(removed)

    def test_a_pin_that_comes_meanwhile_is_heeded(self, tmp_path, monkeypatch):
        self.make(tmp_path, 1, 2, 3, 4)
        pinned = {2}  # since the caller has asked who is
        monkeypatch.setattr(
            shutil,
            "disk_usage",
            lambda _: mock.Mock(free=10 * (4 - len(list_checkpoints(tmp_path)))),
        )
        assert make_room(tmp_path, 8, set(), release=lambda v: v not in pinned) == [1]
        assert prune_checkpoints(tmp_path, 1, set(), release=lambda v: v not in pinned) == [3]
        assert [v for v, _ in list_checkpoints(tmp_path)] == [4, 2]

    def test_pruning_counts_what_a_rollback_left_by_itself(self, tmp_path):
        self.make(tmp_path, 1, 2, 3, 4, 5, 6)
        assert prune_checkpoints(tmp_path, 1, {2}, {3, 4, 5}) == [1, 4, 3]
        assert [v for v, _ in list_checkpoints(tmp_path)] == [6, 5, 2]

    def test_what_a_rollback_left_makes_room_first(self, tmp_path, monkeypatch):
        self.make(tmp_path, 1, 2, 3, 4)
        usage = shutil.disk_usage(tmp_path)

        def free(_):
            return usage._replace(free=100 - 10 * len(list_checkpoints(tmp_path)))

        monkeypatch.setattr(shutil, "disk_usage", free)
        assert make_room(tmp_path, 60, set(), {3, 4}) == [3, 4]  # 80 must be free, less 20 %
        assert make_room(tmp_path, 60, set(), {3, 4}) == []
        assert make_room(tmp_path, 10**6, set(), set()) == [1]
        assert make_room(tmp_path, 10**6, set(), {2}) == [2]  # the newest, but left

    def test_pruning_removes_what_a_crash_left_half_written(self, tmp_path):
        self.make(tmp_path, 1)
        (tmp_path / ".v2.partial").mkdir()
        (tmp_path / ".v2.partial" / "policy.safetensors").write_text("half")
        assert prune_checkpoints(tmp_path, 2, set()) == []
        assert [path.name for path in tmp_path.iterdir()] == ["v1"]
