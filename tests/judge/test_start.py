"""What is wrong with a judge is said at the start, in one sentence."""

import pickle
import subprocess
import sys

import pytest

from judge import Judge, JudgeError, Unscored, Verdict
from judge.preferences import parse_preferences


@pytest.fixture
def no_keys(monkeypatch):
    for name in ("ZAI_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nonsense", "litellm does not know the judge model 'nonsense'"),
        ("nosuchprovider/model", "litellm does not know"),
        ("zai/glm-4.77", "Did you mean zai/glm-4.7"),
        ("zai/glm-4.7", "set the environment variable ZAI_API_KEY"),
        ("gpt-4o-mini", "set the environment variable OPENAI_API_KEY"),
        ("anthropic/claude-sonnet-4-5", "ANTHROPIC_API_KEY"),
        ("offline/nope", "there are offline/archetypes, offline/rules"),
    ],
)
def test_models_that_cannot_work(model, message, no_keys):
    with pytest.raises(JudgeError, match=message):
        Judge(model).check()


def test_models_that_can(no_keys, monkeypatch):
    Judge("offline/rules").check()
    Judge("openai/anything", api_base="http://127.0.0.1:9/v1").check()
    Judge("zai/glm-4.7", api_key="k").check()
    monkeypatch.setenv("ZAI_API_KEY", "k")
    Judge("zai/glm-4.7").check()


def test_a_thinking_switch_that_the_model_lacks(no_keys):
    with pytest.raises(JudgeError, match="no thinking switch"):
        Judge("openai/x", api_base="http://127.0.0.1:9/v1", thinking=True).check()


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": 0},
        {"max_tokens": 1},
        {"max_retries": -1},
        {"concurrency": 0},
        {"votes": 0},
        {"flip_probability": 0.6},
        {"model": " "},
        {"preferences": "nope"},
        {"model": "openai/x", "cache_path": "/proc/no/cache.sqlite"},
    ],
)
def test_settings_out_of_bounds(settings):
    with pytest.raises(JudgeError):
        Judge(**settings)


def test_styles_are_checked():
    judge = Judge("offline/rules")
    judge.check_style("cute", ["cute", "academic"])
    judge.check_style("cute")
    with pytest.raises(JudgeError, match=r"Unknown style 'gothic'.*academic, cute"):
        judge.check_style("gothic", [])
    with pytest.raises(JudgeError, match="Unknown style 'gothic'"):
        judge.check_style("cute", ["cute", "gothic"])
    with pytest.raises(JudgeError, match="not in its pool"):
        judge.check_style("cute", ["academic"])


def test_a_style_that_the_embedded_judge_cannot_tell():
    rubric_only = parse_preferences("[styles.gothic]\ndescription = 'Gloomy castles.'")
    with pytest.raises(JudgeError, match="cannot tell the style 'gothic'"):
        Judge("offline/archetypes", rubric_only).check()
    Judge("openai/x", rubric_only, api_base="http://127.0.0.1:9/v1").check()


async def test_a_judge_that_was_not_checked_says_so_in_service():
    outcome = await Judge("nonsense").score([], "Tea.", "cute")
    assert isinstance(outcome, Unscored)
    assert outcome.reason == "bad_input"
    assert "litellm does not know" in outcome.detail


def test_outcomes_cross_process_borders():
    for outcome in (Verdict(1, 0, "cute", "why"), Unscored("timeout", "long"), JudgeError("no")):
        copy = pickle.loads(pickle.dumps(outcome))
        assert str(copy) == str(outcome)


def test_importing_is_light():
    code = (
        "import sys, judge, judge.preferences; "
        "heavy = {'litellm', 'torch', 'sklearn', 'numpy', 'transformers', 'online_sao'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_embedded_judge_needs_no_torch():
    code = (
        "import sys; from judge import Judge; j = Judge(); j.check(); "
        "answer = 'A little tea for you and me, my friend, hehe!'; "
        "print(type(j.score_sync([], answer, 'cute')).__name__); "
        "print(sorted({'torch', 'sklearn', 'transformers', 'online_sao'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Verdict", "[]"]
