"""Where Ray is told to put the parts."""

import pytest

from online_sao.config import Config
from online_sao.service.serve import placement


def settings(**sections):
    return Config.model_validate(sections)


def test_on_a_cpu_nothing_is_asked_for():
    config = settings(model={"device": "cpu"})
    assert placement(config, config.learner) == placement(config, config.engine) == {}


def test_by_resources():
    config = settings(
        model={"device": "cpu"},
        learner={"resources": {"big": 1}},
        engine={"resources": {"rack_a": 0.5}},
    )
    assert placement(config, config.learner) == {"resources": {"big": 1}}
    assert placement(config, config.engine) == {"resources": {"rack_a": 0.5}}


@pytest.mark.parametrize(("share", "gpus"), [(0.5, 1), (1.0, 2)])
def test_engine_and_learner_share_a_gpu_or_have_one_each(share, gpus):
    """Ray hides the GPUs from an actor that asks for none."""
    config = settings(
        model={"device": "cuda"}, learner={"gpu_share": share}, engine={"gpu_share": share}
    )
    asked = [placement(config, part)["num_gpus"] for part in (config.learner, config.engine)]
    assert asked == [share, share]
    assert sum(asked) == gpus
