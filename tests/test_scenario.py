"""Scenario definitions, request streams, summaries and result folders."""

import gzip
import itertools
from collections import Counter
from pathlib import Path

import pytest

from online_sao.errors import ScenarioError
from online_sao.scenario import (
    Scenario,
    differing_settings,
    heldout_requests,
    load_scenario,
    prompt_stream,
    read_results,
    rollout_row,
    rollouts_to_mark,
    summarize,
    write_results,
)
from online_sao.writing import load_topics

ROOT = Path(__file__).parents[1]
DEFINITIONS = sorted((ROOT / "scenarios").glob("*.toml"))
TOPICS = load_topics()
POOL = ["academic", "cute", "chuunibyou"]

TWO_PHASES = """
name = "two"
claim = "It follows."
seed = 3

[heldout]
every = 2
answers = 5

[thresholds]
window = 4
mark = 0.75

[[phase]]
name = "A"
style = "cute"
pool = ["academic", "cute", "chuunibyou"]
rollouts = 6

[[phase]]
name = "B"
style = "classical"
pool = ["classical", "cute", "chuunibyou"]
rollouts = 4
"""


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> Path:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return path

    return written


@pytest.fixture
def two(write) -> Scenario:
    return load_scenario(write(TWO_PHASES))


def take(stream, count):
    return list(itertools.islice(stream, count))


# Definitions


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.stem)
def test_shipped_definitions_load_and_are_named_after_their_file(path):
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert len(scenario.claim) > 40


def test_preference_shift_is_the_papers():
    scenario = load_scenario(ROOT / "scenarios" / "preference_shift.toml")
    assert [phase.style for phase in scenario.phases] == ["cute", "chuunibyou", "classical"]
    pools = [set(phase.pool) for phase in scenario.phases]
    assert pools[0] == pools[1] == {"academic", "cute", "chuunibyou"}
    assert pools[2] == {"classical", "cute", "chuunibyou"}
    assert all(phase.rollouts >= 100 for phase in scenario.phases)
    assert scenario.final_answers >= 100
    assert (scenario.max_tokens, scenario.temperature, scenario.concurrency) == (56, 1.0, 4)
    assert (scenario.thresholds.window, scenario.thresholds.mark) == (40, 0.8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('claim = "It follows."', "", "claim: Field required"),
        ("seed = 3", "seed = 3\nspeed = 1", "speed: Extra inputs are not permitted"),
        ("seed = 3", "seed = 'x'", "seed: Input should be a valid integer"),
        ('style = "classical"', 'style = "academic"', "style 'academic' is not in the pool of"),
        ('"classical", "cute"', '"classical", "rude"', "unknown style 'rude' in phase 'B'"),
        ('"classical", "cute"', '"classical", "classical"', "names a style twice"),
        ('name = "B"', 'name = "A"', "two phases have the same name"),
        ("rollouts = 4", "rollouts = 0", "phase.1.rollouts: Input should be greater than"),
        ("rollouts = 4", "rollouts = 4\nto_style = 'academic'", "'academic' is not in the pool"),
        ("window = 4", "window = 0", "thresholds.window: Input should be greater than"),
        ("seed = 3", "topics = 'poems'", "There is no topic set 'poems'"),
        ("seed = 3", "[settings]\n'judge.speed' = 1", "judge.speed: Extra inputs"),
        ("seed = 3", "[delay]\nmin_rollouts = 3", "max_rollouts must not be below min_rollouts"),
        ('name = "two"', 'name = "a b"', "name: String should match pattern"),
        ("[[phase]]", "[[phase", "is not valid TOML"),
    ],
)
def test_bad_definitions_are_refused_in_one_line(write, old, new, message):
    assert old in TWO_PHASES
    path = write(TWO_PHASES.replace(old, new, 1))
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_phases_and_no_file(write, tmp_path):
    with pytest.raises(ScenarioError, match="phase: Field required"):
        load_scenario(write("name = 'x'\nclaim = 'y'"))
    with pytest.raises(ScenarioError, match="There is no scenario file"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path)


def test_audience_and_drift_do_not_mix(write):
    audience = "[[phase.audience]]\nname='x'\nstyle='classical'\nsystem='Hi.'\n"
    text = TWO_PHASES + audience
    assert load_scenario(write(text)).phases[1].mixed
    assert not load_scenario(write(text)).phases[0].mixed
    with pytest.raises(ScenarioError, match="both audiences and to_style"):
        load_scenario(write(text.replace("rollouts = 4", "rollouts = 4\nto_style = 'cute'")))
    with pytest.raises(ScenarioError, match="must be its first audience's"):
        load_scenario(write(text.replace("style='classical'", "style='cute'")))


def test_topics_file_beside_the_definition(write, tmp_path):
    shipped = (ROOT / "online_sao" / "data" / "writing.toml").read_text()
    (tmp_path / "mine.toml").write_text(shipped.replace("making tea", "making cocoa"))
    scenario = load_scenario(write("topics = 'mine.toml'\n" + TWO_PHASES))
    topics = {request.topic for request in take(prompt_stream(scenario, 0), 60)}
    assert "making cocoa" in topics
    assert "making tea" not in topics


def stored(scenario: Scenario) -> dict:
    return scenario.model_dump(mode="json", by_alias=True)


def test_results_with_a_topics_file_are_read_from_anywhere(write, tmp_path, monkeypatch):
    shipped = (ROOT / "online_sao" / "data" / "writing.toml").read_text()
    (tmp_path / "mine.toml").write_text(shipped)
    write("topics = 'mine.toml'\n" + TWO_PHASES)
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario("scenario.toml")
    write_results("run", scenario, [row(1, 0, 1.0)], [], preset="sao", complete=True)
    monkeypatch.chdir("/")
    assert read_results(tmp_path / "run").scenario == scenario
    assert next(prompt_stream(scenario, 0)).topic in TOPICS.training
    (tmp_path / "mine.toml").unlink()  # as where only the results were copied to
    assert read_results(tmp_path / "run").scenario == scenario
    with pytest.raises(ScenarioError, match=r"mine\.toml cannot be read"):
        next(prompt_stream(scenario, 0))


def test_topics_are_compared_by_content(write, tmp_path, monkeypatch):
    shipped = (ROOT / "online_sao" / "data" / "writing.toml").read_text()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(shipped)
    monkeypatch.chdir(tmp_path)
    here, there = (
        load_scenario(write(f"topics = '{folder}/mine.toml'\n" + TWO_PHASES))
        for folder in ("here", "there")
    )
    assert here.topics != there.topics
    assert differing_settings(stored(here), stored(there)) == []
    # Older results tell the place alone, from where one stood.
    older = stored(here) | {"topics": "here/mine.toml"}
    del older["topics_hash"]
    assert differing_settings(older, stored(here)) == []
    assert differing_settings(older, stored(there)) == ["topics"]
    (tmp_path / "here" / "mine.toml").write_text(shipped.replace("making tea", "making cocoa"))
    edited = load_scenario(write("topics = 'here/mine.toml'\n" + TWO_PHASES))
    assert differing_settings(stored(edited), stored(here)) == ["topics"]
    # What was edited meanwhile is not asked about in the name of what was read.
    with pytest.raises(ScenarioError, match="was changed while the run went on"):
        next(prompt_stream(here, 0))
    with pytest.raises(ScenarioError, match="was changed while the run went on"):
        heldout_requests(here, 0)
    assert next(prompt_stream(edited, 0)).topic


def test_differing_settings_are_named(two):
    other = two.model_dump(mode="json", by_alias=True)
    other["thresholds"]["mark"] = 0.5
    other["delay"] = {"min_rollouts": 0, "max_rollouts": 1}
    other["settings"] = {"learner.gamma": 0.5}
    other["phase"][0]["rollouts"] = 7
    names = ["delay", "phase", "settings.learner.gamma", "thresholds.mark"]
    assert sorted(differing_settings(stored(two), other)) == names
    assert differing_settings(stored(two), stored(two.replace(seed=9))) == ["seed"]
    assert differing_settings(stored(two), stored(two.replace(final_answers=5))) == []
    assert "topics_hash" not in stored(two)  # as it was stored before there was one


def test_replace_changes_what_is_asked_and_nothing_else(two):
    changed = two.replace(seed=9, phase_rollouts=50, heldout_every=10, heldout_answers=7)
    assert [phase.rollouts for phase in changed.phases] == [50, 50]
    assert (changed.seed, changed.heldout.every, changed.heldout.answers) == (9, 10, 7)
    assert changed.final_answers == 7
    assert two.replace(final_answers=100).final_answers == 100
    assert two.replace() == two
    assert changed.thresholds == two.thresholds
    with pytest.raises(ScenarioError, match=r"phase\.0\.rollouts: Input should be greater"):
        two.replace(phase_rollouts=0)


# Requests


def test_stream_depends_on_definition_seed_and_number_alone(two):
    requests = take(prompt_stream(two, 0), 20)
    assert take(prompt_stream(two, 0, start=7), 13) == requests[7:]
    assert take(prompt_stream(two, 0, seed=3), 20) == requests
    assert take(prompt_stream(two, 0, seed=4), 20) != requests
    assert take(prompt_stream(two.replace(phase_rollouts=99), 0), 20) == requests
    assert [request.position for request in requests] == list(range(20))
    assert len({request.seed for request in requests}) == 20
    other = take(prompt_stream(two, 1), 20)
    assert [r.topic for r in other] != [r.topic for r in requests]


def test_stream_asks_about_training_topics_and_offers_the_phases_pool(two):
    for number, phase in enumerate(two.phases):
        requests = take(prompt_stream(two, number), 120)
        assert set(Counter(r.topic for r in requests).values()) == {2}  # 60 topics, twice each
        for request in requests:
            system, user = (message["content"] for message in request.messages)
            assert request.topic in TOPICS.training
            assert request.topic in user
            assert {s for s, name in TOPICS.styles.items() if name in system} == set(phase.pool)
            assert (request.style, request.pool, request.delay) == (phase.style, phase.pool, 0)


def test_heldout_requests_are_the_same_at_every_evaluation_of_a_pool(two):
    requests = heldout_requests(two, 0)
    assert len(requests) == two.heldout.answers == 5
    assert requests == heldout_requests(two, 0, 5, position=4)
    many = heldout_requests(two, 1, 100)
    assert {request.topic for request in many} == set(TOPICS.heldout)
    assert len({(r.topic, r.seed) for r in many}) == 100
    same_pool = two.model_copy(update={"phases": (two.phases[0], two.phases[0])})
    again = heldout_requests(same_pool, 1)
    assert [r.messages for r in again] == [r.messages for r in requests]


def test_heldout_topics_and_seeds_do_not_depend_on_the_order_of_a_pool(two):
    phase = two.phases[0]
    turned = phase.model_copy(update={"pool": phase.pool[::-1]})
    assert turned.pool != phase.pool
    asked = heldout_requests(two, 0, 40)
    again = heldout_requests(two.model_copy(update={"phases": (turned,)}), 0, 40)
    assert [(r.topic, r.seed) for r in again] == [(r.topic, r.seed) for r in asked]
    other = phase.model_copy(update={"pool": ("cute", "classical"), "style": "cute"})
    assert heldout_requests(two.model_copy(update={"phases": (other,)}), 0)[0].seed != asked[0].seed


def test_audiences_differ_in_system_prompt_and_preference(write):
    text = TWO_PHASES + (
        "[[phase.audience]]\nname='elders'\nstyle='classical'\nsystem='For elders.'\nshare=3\n"
        "[[phase.audience]]\nname='children'\nstyle='cute'\nsystem='For children.'\n"
    )
    scenario = load_scenario(write(text))
    requests = take(prompt_stream(scenario, 1), 2000)
    for request in requests:
        expected = {"elders": "classical", "children": "cute"}[request.audience]
        assert request.style == expected
        assert request.messages[0]["content"].startswith(f"For {request.audience}. You are")
    # share 3 of 4: 1500 expected, standard deviation sqrt(2000 * 3/4 * 1/4) = 19.4
    elders = sum(request.audience == "elders" for request in requests)
    assert 1420 < elders < 1580
    heldout = heldout_requests(scenario, 1, 6)
    assert [request.audience for request in heldout] == ["elders", "children"] * 3
    assert all(request.audience is None for request in take(prompt_stream(scenario, 0), 5))


def test_drift_moves_from_one_style_to_the_other(write):
    text = TWO_PHASES.replace("rollouts = 4", "rollouts = 4001\nto_style = 'cute'")
    scenario = load_scenario(write(text))
    styles = [request.style for request in take(prompt_stream(scenario, 1), 4001)]
    share = [styles[start : start + 1000].count("cute") / 1000 for start in range(0, 4000, 1000)]
    # the chance rises evenly: means of 1/8, 3/8, 5/8, 7/8; standard deviations below 0.016
    assert share == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.06)
    assert (styles[0], styles[-1]) == ("classical", "cute")
    assert heldout_requests(scenario, 1, 1, position=1999)[0].style == "classical"
    assert heldout_requests(scenario, 1, 1, position=2000)[0].style == "cute"
    assert heldout_requests(scenario, 1, 1)[0].style == "cute"


def test_delays_are_drawn_evenly_between_the_bounds(write):
    text = TWO_PHASES.replace("seed = 3", "[delay]\nmin_rollouts = 1\nmax_rollouts = 5")
    scenario = load_scenario(write(text))
    delays = Counter(request.delay for request in take(prompt_stream(scenario, 0), 1000))
    assert set(delays) == {1, 2, 3, 4, 5}
    assert all(140 < count < 260 for count in delays.values())  # 200, sd 12.6


# Summaries: numbers worked out by hand


def test_rollouts_to_mark():
    # windows of 4: 0001 = .25, 0011 = .5, 0111 = .75 (rollouts 3 to 6): reached after 6
    assert rollouts_to_mark([0, 0, 0, 1, 1, 1, 0], 4, 0.75) == 6
    assert rollouts_to_mark([0, 0, 0, 1, 1, 0, 1], 4, 0.76) is None
    assert rollouts_to_mark([1, 1, 1, 1], 4, 1.0) == 4
    assert rollouts_to_mark([1, 1, 1], 4, 0.1) is None  # no whole window yet
    assert rollouts_to_mark([], 4, 0.5) is None
    # 0.1 + 0.2 + 0.3 + 0.4 = 1.0, a mean of 0.25 in spite of rounding
    assert rollouts_to_mark([0.1, 0.2, 0.3, 0.4], 4, 0.25) == 4


def row(index, phase, reward, **more):
    return {
        "index": index,
        "phase": phase,
        "position": index,
        "seq": index,
        "id": f"r{index}",
        "state": "trained" if reward is not None else "unscored",
        "reward": reward,
        "preferred_style": "cute",
        "elapsed_s": float(index),
        **more,
    }


def heldout_row(evaluation, phase, detected, preferred, **more):
    return {
        "evaluation": evaluation,
        "index": 2 * evaluation,
        "phase": phase,
        "final": 0,
        "preferred_style": preferred,
        "detected_style": detected,
        "quality": 1.0,
        "reward": float(detected == preferred),
        "topic": "a map | of the city",
        "answer": "One.\nTwo | three.",
        **more,
    }


def test_summary_by_hand(two):
    rows = [
        # phase A: rewards 0 0 1 1 1, one unscored between
        row(1, 0, 0.0, detected_style="academic", masked_fraction=0.5, num_action_tokens=10),
        row(2, 0, 0.0, detected_style="none", masked_fraction=0.0, num_action_tokens=30),
        row(3, 0, None),
        row(4, 0, 1.0, detected_style="cute", policy_lag=3, quality=1.0),
        row(5, 0, 1.0, detected_style="cute", policy_lag=1, quality=0.0),
        row(6, 0, 1.0, detected_style="cute", seconds=2.0),
        # phase B, cut short: 1 0
        row(7, 1, 1.0, detected_style="classical", seconds=1.0),
        row(8, 1, 0.0, detected_style="cute", elapsed_s=20.0, seconds=3.0),
    ]
    heldout = [
        heldout_row(0, 0, "academic", "cute"),
        heldout_row(3, 0, "cute", "cute", final=1),
        heldout_row(3, 0, "cute", "cute", final=1),
        heldout_row(3, 0, "none", "cute", final=1),
        heldout_row(3, 0, None, "cute", final=1, reward=None),  # the judge failed
    ]
    summary = summarize(rows[::-1], two, heldout)  # the order of the rows must not matter
    first, second = summary["phases"]
    assert first["rollouts"] == 6
    assert first["unscored"] == 1
    assert first["states"] == {"trained": 5, "unscored": 1}
    assert first["mean_reward"] == pytest.approx(3 / 5)
    assert first["last_mean"] == pytest.approx(3 / 4)  # the last four rewards are 0 1 1 1
    assert first["rollouts_to_mark"] == 5
    assert first["style_shares"] == {"academic": 0.2, "cute": 0.6, "chuunibyou": 0.0}
    assert first["masked_fraction"] == pytest.approx(5 / 40)  # 5 of 10 and 0 of 30 tokens
    assert first["policy_lag_max"] == 3
    assert first["quality"] == 0.5
    assert first["update_seconds"] == 2.0
    assert first["seconds"] == 6.0
    assert first["heldout"] == {
        "index": 6,
        "final": True,
        "answers": 3,
        "preferred_share": pytest.approx(2 / 3),
        "shares": {"academic": 0.0, "cute": pytest.approx(2 / 3), "chuunibyou": 0.0},
        "mean_reward": pytest.approx(2 / 3),
        "quality": 1.0,
    }
    assert (second["rollouts"], second["planned"]) == (2, 4)
    assert second["mean_reward"] == second["last_mean"] == 0.5
    assert second["rollouts_to_mark"] is None
    assert second["seconds"] == 14.0
    assert second["update_seconds"] == 2.0
    assert second["masked_fraction"] is None
    assert second["heldout"] is None
    assert summary["rollouts"] == 8
    assert summary["unscored"] == 1
    assert summary["mean_reward"] == pytest.approx(4 / 7)
    assert summary["seconds"] == 20.0


def test_rewards_before_a_switch_do_not_count_after_it(two):
    """Phase A ends with 1 1 1 1; phase B begins with 0 and must not look learned."""
    rows = [row(n, 0, 1.0) for n in range(1, 7)] + [
        row(6 + n, 1, reward) for n, reward in enumerate([0.0, 1.0, 1.0, 1.0], 1)
    ]
    first, second = summarize(rows, two)["phases"]
    assert first["rollouts_to_mark"] == 4
    assert second["rollouts_to_mark"] == 4  # 0 1 1 1 = 0.75, and not sooner
    rows[-1]["reward"] = 0.0
    assert summarize(rows, two)["phases"][1]["rollouts_to_mark"] is None


def test_summary_of_nothing(two):
    summary = summarize([], two)
    assert summary["mean_reward"] is None
    assert summary["seconds"] == 0.0
    assert [phase["last_mean"] for phase in summary["phases"]] == [None, None]


def test_audience_rewards(write):
    text = TWO_PHASES + (
        "[[phase.audience]]\nname='elders'\nstyle='classical'\nsystem='a'\n"
        "[[phase.audience]]\nname='children'\nstyle='cute'\nsystem='b'\n"
    )
    rows = [
        row(1, 1, 1.0, audience="elders"),
        row(2, 1, 0.0, audience="children"),
        row(3, 1, 0.0, audience="elders"),
    ]
    summary = summarize(rows, load_scenario(write(text)))
    assert summary["phases"][1]["audiences"] == {"elders": 0.5, "children": 0.0}


def test_rollout_row(two):
    request = next(prompt_stream(two, 0))
    record = {
        "id": "chatcmpl-1",
        "seq": 12,
        "state": "trained",
        "reason": None,
        "verdict": {"quality": 1, "style": 0, "reward": 0, "detected_style": "academic"},
        "reward": 0,
        "finish_reason": "stop",
        "num_action_tokens": 40,
        "weight_version_start": 7,
        "trained_version": 10,
        "metrics": {
            "policy/masked_fraction": 0.025,
            "critic/value_first": 0.4,
            "critic/explained_variance": None,
            "seconds/total": 1.5,
            "policy/estimator": "critic",
        },
    }
    made = rollout_row(record, request, 4, 9.876)
    assert made["index"] == 4
    assert (made["seq"], made["topic"], made["preferred_style"]) == (12, request.topic, "cute")
    assert (made["quality"], made["style_mark"], made["reward"]) == (1, 0, 0)
    assert made["policy_lag"] == 2  # version 10 was made from 9, the answer from 7
    assert (made["masked_fraction"], made["value_first"], made["seconds"]) == (0.025, 0.4, 1.5)
    assert made["elapsed_s"] == 9.88
    assert "policy/estimator" not in made  # texts are no metrics
    record["metrics"]["rollout/policy_lag_max"] = 5
    assert rollout_row(record, request, 4, 0)["policy_lag"] == 5
    bare = rollout_row({"id": "x", "seq": 1, "state": "unscored"}, request, 1, 0)
    assert bare["reward"] is bare["policy_lag"] is bare["detected_style"] is None


# Result folders


def test_results_come_back_as_they_were_written(two, tmp_path):
    rows = [
        row(1, 0, 0.0, detected_style="academic", **{"critic/grad_norm": 12.5}),
        row(2, 0, None, detected_style=None),
        row(3, 1, 1.0, detected_style="cute", masked_fraction=0.125, num_action_tokens=8),
    ]
    heldout = [heldout_row(0, 0, "cute", "cute"), heldout_row(0, 0, "none", "cute")]
    summary = write_results(
        tmp_path / "run", two, rows, heldout, preset="sao", complete=True, run_id="r"
    )
    results = read_results(tmp_path / "run")
    assert (results.preset, results.seed, results.summary["run_id"]) == ("sao", 3, "r")
    assert results.summary["complete"] is True
    assert results.scenario == two
    assert results.rows[0]["critic/grad_norm"] == 12.5
    assert results.rows[1]["critic/grad_norm"] is None
    assert [r["reward"] for r in results.rows] == [0.0, None, 1.0]
    assert results.heldout[0]["answer"] == "One.\nTwo | three."
    again = summarize(results.rows, results.scenario, results.heldout)
    assert again == {key: summary[key] for key in again}


def test_same_rows_same_bytes(two, tmp_path):
    for name in ("a", "b"):
        write_results(tmp_path / name, two, [row(1, 0, 1.0)], [], preset="sao", complete=True)
    for name in ("rollouts.csv.gz", "summary.json", "heldout.csv", "answers.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_answers_show_the_last_evaluation_of_each_phase(two, tmp_path):
    heldout = [
        heldout_row(0, 0, "academic", "cute", answer="Early."),
        heldout_row(1, 0, "cute", "cute", final=1, answer="Late\n| aww."),
        heldout_row(2, 1, "cute", "classical", answer="Unfinished."),
    ]
    write_results(tmp_path, two, [row(1, 0, 1.0)], heldout, preset="sao", complete=False)
    text = (tmp_path / "answers.md").read_text()
    assert "Early." not in text
    assert "| a map \\| of the city | cute | cute | 1 | 1 | Late \\| aww. |" in text
    assert "## A: after 2 rollouts (end of the phase)" in text
    assert "## B: after 4 rollouts (not the phase's end: cut short)" in text


def test_folders_that_hold_no_results(two, tmp_path):
    with pytest.raises(ScenarioError, match=r"it has no summary\.json"):
        read_results(tmp_path)
    write_results(tmp_path, two, [row(1, 0, 1.0)], [], preset="sao", complete=True)
    for name, content in (
        ("rollouts.csv.gz", b"no gzip"),
        ("rollouts.csv.gz", gzip.compress(b"index")[:10] + b"\xff" * 40),  # damaged inside
        ("summary.json", b"{"),
        ("summary.json", b"{}"),
    ):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ScenarioError, match="cannot be read"):
            read_results(tmp_path)
        (tmp_path / name).write_bytes(kept)
    assert read_results(tmp_path).rows[0]["reward"] == 1.0


def test_an_answer_with_a_carriage_return_is_read_back(two, tmp_path):
    answered = heldout_row(0, 0, "academic", "cute", answer="one\rtwo\r\n3, 4")
    write_results(tmp_path, two, [row(1, 0, 1.0)], [answered], preset="sao", complete=False)
    assert read_results(tmp_path).heldout[0]["answer"] == "one\ntwo\n3, 4"
