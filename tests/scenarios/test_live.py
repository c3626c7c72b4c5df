"""The scenario script as a user runs it, against an endpoint that keeps the contract."""

import json
import signal
import time
from collections import Counter
from pathlib import Path

import figures
import live
import matplotlib.image
import numpy as np
import pytest
from fake_endpoint import TOPICS, FakeEndpoint, served
from matplotlib.colors import to_rgb

from online_sao.errors import ScenarioError
from online_sao.scenario import load_scenario, prompt_stream, read_results

SCRIPT = "preference_shift.py"
SCENARIOS = Path(__file__).parents[2] / "scenarios"
QUICK = ("--poll", 0.01, "--wait", 2, "--patience", 2)
STYLES = ["cute", "chuunibyou", "classical"]
SHORT = """
name = "short"
claim = "For tests."
[heldout]
every = 0
answers = 4
[[phase]]
name = "Cute"
style = "cute"
pool = ["academic", "cute", "chuunibyou"]
rollouts = 12
"""


def wait_for(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def colors_in(path) -> np.ndarray:
    """The different colours of a picture, one a row, as bytes."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    return np.unique(pixels.reshape(-1, 3), axis=0)


def has_color(path, color) -> bool:
    wanted = np.round(np.array(to_rgb(color)) * 255)
    return bool((np.abs(colors_in(path) - wanted).max(axis=1) <= 1).any())


def test_three_phases_end_to_end(fake, url, run, tmp_path):
    fake.not_ready_polls = 1
    out = tmp_path / "result"
    code, shown, err = run(
        SCRIPT,
        *("--url", url, "--out", out, "--preset", "sao", "--seed", 5),
        *("--phase-rollouts", 45, "--heldout-every", 20, "--heldout-answers", 12, *QUICK),
    )
    assert code == 0, err
    results = read_results(out)
    summary = results.summary

    # The endpoint's side: what was asked, and when the preference moved.
    assert [p["style"] for p in fake.preferences] == STYLES
    assert len(fake.training) == 135
    assert {record["state"] for record in fake.training} == {"trained"}
    assert {r["topic"] for r in fake.training} <= set(TOPICS.training)
    assert fake.max_in_flight == 4
    assert fake.trained_while_paused == 0
    assert not fake.paused
    opted_out = [fake.by_id[rollout_id] for rollout_id in sorted(fake.opted_out)]
    # evaluations: phase 1 at 0 20 40 45, phase 2 at 20 40 45, phase 3 (new pool) at 0 20 40 45
    assert len(opted_out) == 11 * 12
    assert fake.pauses == 11
    assert {r["topic"] for r in opted_out} <= set(TOPICS.heldout)
    assert {r["trained_version"] for r in opted_out} == {None}

    # Every rollout belongs to the phase in whose preference it was judged.
    assert [row["index"] for row in results.rows] == list(range(1, 136))
    assert [row["phase"] for row in results.rows] == [0] * 45 + [1] * 45 + [2] * 45
    for row in results.rows:
        record = fake.by_id[row["id"]]
        assert record["preference"]["style"] == row["preferred_style"] == STYLES[row["phase"]]
        assert (row["reward"], row["seq"]) == (record["reward"], record["seq"])
        assert row["masked_fraction"] == record["metrics"]["policy/masked_fraction"]
        assert row["topic"] == record["topic"]
    asked = Counter((row["phase"], row["position"]) for row in results.rows)
    assert asked == Counter((phase, position) for phase in range(3) for position in range(45))

    # The reported numbers, recounted from the endpoint's records.
    for number, phase in enumerate(summary["phases"]):
        rewards = [r["reward"] for r in fake.training[45 * number : 45 * number + 45]]
        assert phase["mean_reward"] == pytest.approx(sum(rewards) / 45)
        assert phase["last_mean"] == pytest.approx(sum(rewards[-40:]) / 40)
        last = opted_out[12 * [4, 7, 11][number] - 12 : 12 * [4, 7, 11][number]]
        share = sum(r["drawn"] == STYLES[number] for r in last) / 12
        assert phase["heldout"]["preferred_share"] == pytest.approx(share)
        assert share >= 0.75  # the rule has learned by then
    assert summary["complete"] is True
    assert (summary["preset"], summary["seed"], summary["run_id"]) == ("sao", 5, "sao-0-abc")
    assert summary["phases"][0]["policy_lag_max"] <= 3

    # The files and what is said.
    assert not (out / "journal.jsonl").exists()
    assert results.heldout[-1]["answer"] in (out / "answers.md").read_text()
    for style in ("#CC79A7", "#D55E00", "#009E73", "#0072B2"):
        assert has_color(out / "figure_5a.png", style)
    assert has_color(out / "figure_5b.png", "#0072B2")
    assert not has_color(out / "figure_5b.png", "#E69F00")
    assert "Chuunibyou" in shown
    assert "45/45" in shown
    assert str(out) in shown.replace("\n", "")
    assert "the learner is pretraining, value pretraining 3/32" in err

    # A finished run is not run over by the same command.
    code, _, err = run(SCRIPT, "--url", url, "--out", out, *QUICK)
    assert code == 2
    assert "already holds a finished run" in err
    assert len(fake.training) == 135


def test_ctrl_c_while_learning_is_paused_then_going_on(fake, url, start, run, tmp_path):
    out = tmp_path / "result"
    arguments = (
        *("--url", url, "--out", out, "--phase-rollouts", 30),
        *("--heldout-every", 10, "--heldout-answers", 150, "--final-answers", 8, *QUICK),
    )
    process = start(SCRIPT, *arguments)
    # The third evaluation, of 150 answers, is under way: learning is paused by the script.
    wait_for(lambda: fake.pauses == 3 and fake.paused)
    process.send_signal(signal.SIGINT)
    shown, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "preference_shift.py: stopped; learning goes on." in err
    assert "To go on with this run, repeat the command.\n" in err
    assert not fake.paused
    partial = read_results(out)
    assert partial.summary["complete"] is False
    assert len(partial.rows) == 20
    assert (out / "figure_5a.png").exists()
    assert "20/30" in shown
    assert "not yet" in shown

    shorter = [8 if argument == 150 else argument for argument in arguments]
    code, _, err = run(SCRIPT, *shorter)
    assert code == 2
    assert "unfinished run of another scenario" in err
    code, _, err = run(SCRIPT, *arguments, "--preset", "running_mean")
    assert code == 2
    assert "The endpoint runs preset sao, not running_mean" in err

    process = start(SCRIPT, *arguments)
    wait_for(lambda: len(fake.training) >= 25)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "Going on after 20 rollouts" in err
    assert not fake.paused


def test_killed_runs_go_on_without_asking_twice(fake, url, start, run, tmp_path):
    out = tmp_path / "result"
    fake.update_s = 0.02
    arguments = (
        *("--url", url, "--out", out, "--phase-rollouts", 24),
        *("--heldout-every", 0, "--heldout-answers", 6, *QUICK),
    )
    process = start(SCRIPT, *arguments)
    wait_for(lambda: len(fake.training) >= 10)
    process.kill()
    process.communicate()
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    receipts = {entry["id"] for entry in journal if entry["kind"] == "asked"}
    assert receipts
    assert not (out / "summary.json").exists()
    with (out / "journal.jsonl").open("a") as stream:
        stream.write('{"kind": "rollout", "row": {"se')  # cut off while it was written

    code, shown, err = run(SCRIPT, *arguments)
    assert code == 0, err
    results = read_results(out)
    assert results.summary["complete"] is True
    positions = Counter((row["phase"], row["position"]) for row in results.rows)
    assert positions == Counter((phase, n) for phase in range(3) for n in range(24))
    assert receipts <= {row["id"] for row in results.rows}
    # Only answers that were on their way at the kill are asked again.
    assert len(fake.training) - len(results.rows) <= 4
    assert [row["elapsed_s"] for row in results.rows] == sorted(
        row["elapsed_s"] for row in results.rows
    )
    assert "24/24" in shown


def broken_after(monkeypatch, number):
    """The endpoint's answers cease after so many that are learned from."""
    asked = iter(range(number))

    async def chat(self, request, scenario, *, learn):
        if learn and next(asked, None) is None:
            raise ScenarioError("Nothing more.")
        return await chat_of_old(self, request, scenario, learn=learn)

    chat_of_old = live.Endpoint.chat
    monkeypatch.setattr(live.Endpoint, "chat", chat)


def test_a_line_cut_short_does_not_swallow_the_next(fake, url, call, monkeypatch, tmp_path):
    # One at a time: what is written first after going on is that a request was asked.
    (tmp_path / "short.toml").write_text("concurrency = 1\nmax_in_flight = 1\n" + SHORT)
    out = tmp_path / "o"
    arguments = ("live.py", tmp_path / "short.toml", "--url", url, "--out", out, *QUICK)
    cut = ['{"kind": "rollout", "row": {"se', '{"kind": "heldout", "rows": [{"answer": "\u53e5']
    for number, text in enumerate(cut):
        with monkeypatch.context() as patched:
            broken_after(patched, 4)
            code, _, err = call(*arguments)
        assert (code, "Nothing more." in err) == (2, True), err
        assert ("Going on after 4 rollouts" in err) == (number == 1)
        with (out / "journal.jsonl").open("ab") as stream:
            stream.write(text.encode()[:-1])  # the second within a character
    code, _, err = call(*arguments)
    assert code == 0, err
    assert "Going on after 8 rollouts" in err
    rows = read_results(out).rows
    assert sorted(row["position"] for row in rows) == list(range(12))
    assert len(fake.training) == 12  # none was asked twice


def test_an_entry_begins_a_line_of_its_own(tmp_path):
    journal = live.Journal(tmp_path / "o" / "journal.jsonl")
    journal.add("start", note="\u53e5")
    journal.add("asked", id="a")
    assert journal.path.read_text("utf-8").count("\n") == 2
    with journal.path.open("a") as stream:
        stream.write('{"kind": "ask')
    journal.add("asked", id="b")
    journal.add("asked", id="c")
    assert [entry.get("id") for entry in journal.read()] == [None, "a", "b", "c"]


def test_a_run_whose_receipt_was_lost_goes_on(fake, url, call, monkeypatch, tmp_path):
    # As a journal of an older program may be: an outcome without the line that it was asked.
    (tmp_path / "short.toml").write_text("concurrency = 1\nmax_in_flight = 1\n" + SHORT)
    out = tmp_path / "o"
    arguments = ("live.py", tmp_path / "short.toml", "--url", url, "--out", out, *QUICK)
    with monkeypatch.context() as patched:
        broken_after(patched, 4)
        call(*arguments)
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    asked = [number for number, line in enumerate(lines) if '"kind": "asked"' in line]
    lines[asked[-1]] = lines[asked[-1]][:20] + "\n"
    (out / "journal.jsonl").write_text("".join(lines))
    code, _, err = call(*arguments)
    assert code == 0, err
    assert sorted(row["position"] for row in read_results(out).rows) == list(range(12))
    assert len(fake.training) == 12


@pytest.mark.parametrize(("more", "without"), [((), ""), (("--fresh",), " without --fresh")])
def test_stopped_while_it_draws_it_draws_again(
    fake, url, call, monkeypatch, tmp_path, more, without
):
    def stop(folder):
        raise KeyboardInterrupt

    (tmp_path / "short.toml").write_text(SHORT)
    out = tmp_path / "o"
    arguments = ("live.py", tmp_path / "short.toml", "--url", url, "--out", out, *QUICK)
    with monkeypatch.context() as patched:
        patched.setattr(figures, "draw_run", stop)
        code, _, err = call(*arguments, *more)
    assert code == 130
    assert f"To go on with this run, repeat the command{without}.\n" in err
    assert len(fake.training) == 12
    code, _, err = call(*arguments)
    assert code == 0, err
    assert len(fake.training) == 12  # nothing is asked anew
    assert read_results(out).summary["complete"] is True
    assert (out / "figure_5b.png").exists()
    assert not (out / "journal.jsonl").exists()


def test_weights_older_than_the_journal_are_noticed(fake, url, start, run, tmp_path):
    arguments = ("--url", url, "--out", tmp_path / "o", "--phase-rollouts", 500, *QUICK)
    process = start(SCRIPT, *arguments, "--heldout-answers", 1)
    wait_for(lambda: fake.version >= 10)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    fake.version = 3
    code, _, err = run(SCRIPT, *arguments, "--heldout-answers", 1)
    assert code == 2
    assert "The endpoint has made 3 updates" in err
    assert "Start over with --fresh" in err


def test_no_endpoint_is_one_line_and_exit_code_2(run, tmp_path):
    began = time.monotonic()
    code, shown, err = run(SCRIPT, "--url", "http://127.0.0.1:9", "--wait", 0.2)
    assert code == 2
    said = [line for line in err.splitlines() if "..." not in line]  # without the progress line
    assert len(said) == 1
    assert said[0].startswith("preference_shift.py: No endpoint answers at http://127.0.0.1:9 (")
    assert "Start one with `online-sao serve`" in said[0]
    assert shown == ""
    assert time.monotonic() - began < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.toml",), "There is no scenario file none.toml"),
        (("short.toml", "--phase-rollouts", 0), "phase.0.rollouts: Input should be greater than"),
        (("short.toml", "--heldout-answers", 0), "heldout.answers: Input should be greater than"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(call, tmp_path, arguments, message):
    (tmp_path / "short.toml").write_text(SHORT)
    code, shown, err = call("live.py", *arguments, "--url", "http://127.0.0.1:9")
    assert code == 2
    assert message in err
    assert err.startswith("live.py: ")
    assert len(err.splitlines()) == 1
    assert shown == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://h:80a"), "http://h:80a is no address of an endpoint (Invalid port: "),
        (("--admin-key", "schlüssel"), "The admin key has characters that no request can carry"),
        (("--api-key", "a\tb"), "Correct ONLINE_SAO_API_KEY, or --api-key."),
    ],
)
def test_what_no_request_can_carry_is_one_line(call, tmp_path, arguments, message):
    (tmp_path / "short.toml").write_text(SHORT)
    code, shown, err = call("live.py", "short.toml", *arguments)
    assert (code, shown) == (2, "")
    assert err.startswith("live.py: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_something_else_at_the_address(call):
    from fastapi import FastAPI

    other = FakeEndpoint()
    other.app = FastAPI()
    with served(other) as address:
        code, _, err = call(
            "live.py", SCENARIOS / "preference_shift.toml", "--url", address, *QUICK
        )
    assert code == 2
    assert "it is not this endpoint" in err


def test_keys_are_sent_where_they_belong(fake, url, call, tmp_path):
    fake.keys = ("user-key", "admin-key")
    (tmp_path / "short.toml").write_text(SHORT)
    arguments = ("live.py", tmp_path / "short.toml", "--url", url, "--out", tmp_path / "o", *QUICK)
    code, _, err = call(*arguments)
    assert code == 2
    assert "(401): This route needs a key. Give the keys with --api-key and --admin-key." in err
    code, _, err = call(*arguments, ONLINE_SAO_API_KEY="user-key", ONLINE_SAO_ADMIN_KEY="admin-key")
    assert code == 0, err
    assert len(fake.training) == 12


def test_a_busy_endpoint_is_asked_again(fake, url, call, tmp_path):
    fake.fail_next = [(429, {"Retry-After": "0.1"}), (503, {}), (429, {"Retry-After": "x"})]
    (tmp_path / "short.toml").write_text(SHORT)
    code, _, err = call(
        "live.py", tmp_path / "short.toml", "--url", url, "--out", tmp_path / "o", *QUICK
    )
    assert code == 0, err
    assert fake.fail_next == []
    assert len(fake.training) == 12


def test_a_refusal_is_not_asked_again(fake, url, call, tmp_path):
    fake.fail_next = [(400, {})] * 8
    (tmp_path / "short.toml").write_text(SHORT)
    code, _, err = call(
        "live.py", tmp_path / "short.toml", "--url", url, "--out", tmp_path / "o", *QUICK
    )
    assert code == 2
    assert "refused POST /v1/chat/completions (400): queue is full" in err
    assert not fake.paused  # it failed in an evaluation, with learning paused


def test_each_wave_is_answered_by_what_the_one_before_taught(fake, url, run, tmp_path):
    fake.publish_s = 0.2
    (tmp_path / "short.toml").write_text(SHORT)
    code, _, err = run("live.py", tmp_path / "short.toml", "--url", url, "--out", "o", *QUICK)
    assert code == 0, err
    lags = [row["policy_lag"] for row in read_results(tmp_path / "o").rows]
    assert sorted(lags) == sorted(3 * [0, 1, 2, 3])  # three waves of four
    answered_by = {r["weight_version_start"] for r in fake.records if r["id"] in fake.opted_out}
    assert 12 in answered_by  # the last evaluation


def test_endpoint_lost_in_the_middle(start, run, tmp_path):
    (tmp_path / "short.toml").write_text(SHORT.replace("rollouts = 12", "rollouts = 300"))
    fake = FakeEndpoint(update_s=0.02)
    with served(fake) as address:
        arguments = ("live.py", "short.toml", "--url", address, "--out", "o", *QUICK)
        process = start(*arguments, "--fresh")
        wait_for(lambda: fake.version >= 8)
    shown, err = process.communicate(timeout=90)
    assert process.returncode == 2
    assert "stopped answering" in err
    assert "repeat the command without --fresh: the run goes on" in err  # which would forget it
    kept = read_results(tmp_path / "o").rows
    assert len(kept) >= 4
    assert "/300" in shown

    fake.app = fake._make_app()  # it comes back with its store, at the same address
    with served(fake, port=int(address.rpartition(":")[2])):
        process = start(*arguments)
        wait_for(lambda: len(fake.training) >= 40)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    rows = read_results(tmp_path / "o").rows
    assert {row["id"] for row in kept} <= {row["id"] for row in rows}
    assert len({row["position"] for row in rows}) == len(rows) >= 30


def test_audiences_get_their_own_preference(fake, url, call, tmp_path):
    code, _, err = call(
        "live.py",
        SCENARIOS / "two_audiences.toml",
        *("--url", url, "--out", tmp_path / "o", "--phase-rollouts", 30),
        *("--heldout-every", 0, "--heldout-answers", 6, *QUICK),
    )
    assert code == 0, err
    results = read_results(tmp_path / "o")
    assert len(results.rows) == 30
    for row in [*results.rows, *results.heldout]:
        record = fake.by_id[row["id"]]
        wanted = {"elders": "classical", "children": "cute"}[row["audience"]]
        assert record["preference"]["style"] == row["preferred_style"] == wanted
        reader = {"elders": "judge", "children": "child"}[row["audience"]]
        assert reader in record["messages"][0]["content"]
    assert {row["audience"] for row in results.rows} == {"elders", "children"}
    assert set(results.summary["phases"][0]["audiences"]) == {"elders", "children"}


def test_drift_follows_the_definition(fake, url, call, tmp_path):
    definition = SCENARIOS / "gradual_drift.toml"
    code, _, err = call(
        "live.py",
        definition,
        *("--url", url, "--out", tmp_path / "o", "--phase-rollouts", 30),
        *("--heldout-every", 0, "--heldout-answers", 4, *QUICK),
    )
    assert code == 0, err
    scenario = load_scenario(definition).replace(phase_rollouts=30)
    rows = [row for row in read_results(tmp_path / "o").rows if row["phase"] == 1]
    assert len(rows) == 30
    for row in rows:
        request = next(prompt_stream(scenario, 1, start=row["position"]))
        record = fake.by_id[row["id"]]
        assert record["preference"]["style"] == row["preferred_style"] == request.style
        assert record["messages"] == request.messages
    assert {row["preferred_style"] for row in rows} == {"cute", "chuunibyou"}


def test_settings_are_named_and_delays_refused(fake, url, call, tmp_path):
    path = tmp_path / "short.toml"
    settings = '[settings]\n"judge.flip_probability" = 0.1\n'
    path.write_text(SHORT.replace("[heldout]", settings + "[heldout]"))
    code, _, err = call("live.py", path, "--url", url, "--out", tmp_path / "o", *QUICK)
    assert code == 0
    assert "needs an endpoint started with --set judge.flip_probability=0.1" in err
    path.write_text(SHORT + "[delay]\nmax_rollouts = 5\n")
    code, _, err = call("live.py", path, "--url", url, *QUICK)
    assert code == 2
    assert "only the offline runner can do" in err


def test_help_teaches(run):
    code, shown, _ = run(SCRIPT, "--help")
    assert code == 0
    for part in ("online-sao serve", "compare.py", "--phase-rollouts", "ONLINE_SAO_API_KEY"):
        assert part in shown
