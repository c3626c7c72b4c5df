"""Where Ray is told to put the parts."""

import pytest

from online_sao.config import Config
from online_sao.errors import ConfigError
from online_sao.service.http import API_KEY_VARIABLE
from online_sao.service.serve import check_resources, check_settings, placement


def settings(**sections):
    return Config.model_validate(sections)


class TestWhoMayReachIt:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
    def test_others_only_with_a_key_or_if_that_is_meant(self, monkeypatch, host):
        with pytest.raises(ConfigError, match="--insecure"):
            check_settings(settings(service={"host": host}))
        check_settings(settings(service={"host": host, "insecure": True}))
        monkeypatch.setenv(API_KEY_VARIABLE, "a-key-of-the-tests")
        check_settings(settings(service={"host": host}))

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
    def test_this_machine_always(self, host):
        check_settings(settings(service={"host": host}))


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


class TestWhatRayCouldNeverPlace:
    def test_what_fits(self):
        config = settings(model={"device": "cpu"}, engine={"num_replicas": 3})
        check_resources(config, {"CPU": 4})

    def test_more_replicas_than_cpus(self):
        config = settings(model={"device": "cpu"}, engine={"num_replicas": 4})
        with pytest.raises(ConfigError, match=r"5 CPU of 4 .* engine\.num_replicas"):
            check_resources(config, {"CPU": 4})

    def test_a_misspelt_resource(self):
        config = settings(model={"device": "cpu"}, engine={"resources": {"rak": 1}})
        with pytest.raises(ConfigError, match="1 rak of 0"):
            check_resources(config, {"CPU": 4, "rack": 1})

    def test_three_halves_of_a_gpu(self):
        config = settings(model={"device": "cuda"}, engine={"num_replicas": 2, "gpu_share": 0.5})
        with pytest.raises(ConfigError, match="GPU of 1"):
            check_resources(config, {"CPU": 8, "GPU": 1})
