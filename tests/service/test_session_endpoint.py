"""A conversation of two turns through the official client, to what the learner trains on.

Token by token: what was seen and sampled is what is learned from, and only what was sampled.
"""

import time

import openai
import pytest
from served import TINY_SETTINGS, ServedEndpoint

from online_sao.learner.batch import make_batch
from online_sao.store import RolloutStore

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

QUESTIONS = ("Write about rain.", "And about tea?", "Now both.")


@pytest.fixture(scope="module")
def by_session(tiny_model, tmp_path_factory):
    """An endpoint whose sessions are learned from as a whole."""
    settings = (*TINY_SETTINGS, "learner.credit=session", "service.session_idle_s=15")
    served = ServedEndpoint(tiny_model, tmp_path_factory.mktemp("run") / "s", *settings)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def converse(endpoint, session, questions=QUESTIONS[:2], **fields):
    """Ask one after the other with the whole history; the ids of the answers."""
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)
    messages, ids = [], []
    for number, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        streams = number % 2 == 1
        answer = client.chat.completions.create(
            model=endpoint.model.name,
            messages=messages,
            max_tokens=8,
            stream=streams,
            extra_headers={"X-Session-Id": session},
            **fields,
        )
        if streams:
            chunks = list(answer)
            ids.append(chunks[0].id)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            messages.append({"role": "assistant", "content": text})
        else:
            ids.append(answer.id)
            messages.append(answer.choices[0].message)  # as clients do
    return ids


def stored(endpoint, ids):
    with RolloutStore(f"sqlite:///{endpoint.run_dir}/store.sqlite") as store:
        return store.get_many(ids)


def check_history(first, second, tokenizer):
    """The second prompt is the first's tokens, its sampled tokens, and what is templated anew."""
    seen = [*first.prompt_token_ids.tolist(), *first.token_ids.tolist()]
    prompt = second.prompt_token_ids.tolist()
    assert prompt[: len(seen)] == seen
    new = tokenizer.decode(prompt[len(seen) :])
    question = second.messages[-1]["content"]
    asked = f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ended = first.token_ids[-1] == tokenizer.eos_token_id
    assert new == (asked if ended else "<|im_end|>" + asked)


def printed(batch, tokenizer, out):
    """One line per token: position, id, text, whether it is learned from, of which turn."""
    for t, (id, acts, turn) in enumerate(
        zip(batch.token_ids[0], batch.action_mask[0], batch.action_index[0], strict=True)
    ):
        text = repr(tokenizer.decode([int(id)]))
        out(f"{t:4d} {int(id):5d} {text:20s} {'ACTION' if acts else '.':7s} {int(turn)}")


def check_mask(trajectory, tokenizer):
    """Every token of `trajectory`: learned from if and only if it was sampled in it."""
    batch = make_batch([trajectory])
    printed(batch, tokenizer, print)
    expected = []
    for number, rollout in enumerate(trajectory):
        observed = rollout.prompt_token_ids.tolist()[len(expected) :]
        expected += [(id, -1, 0.0) for id in observed]
        expected += [
            (int(id), number, float(logprob))
            for id, logprob in zip(rollout.token_ids, rollout.behavior_logprobs, strict=True)
        ]
    assert len(expected) == batch.token_ids.shape[1]
    for t, (id, turn, logprob) in enumerate(expected):
        assert int(batch.token_ids[0, t]) == id, t
        assert int(batch.action_index[0, t]) == turn, t
        assert bool(batch.action_mask[0, t]) == (turn >= 0), t
        assert float(batch.behavior_logprobs[0, t]) == logprob, t
    return batch


def test_credit_by_turn(endpoint, tokenizer):
    ids = converse(endpoint, "by-turn")
    shown = [endpoint.settled(id) for id in ids]
    assert [r["state"] for r in shown] == ["trained", "trained"]
    assert [(r["trajectory_id"], r["turn"]) for r in shown] == [(ids[0], 0), (ids[0], 1)]
    assert shown[0]["trained_version"] != shown[1]["trained_version"]
    first, second = stored(endpoint, ids)
    check_history(first, second, tokenizer)
    for rollout in (first, second):
        print(f"--- the update of version {rollout.trained_version}")
        batch = check_mask([rollout], tokenizer)
        # the history is seen, and masked
        assert batch.num_actions == len(rollout.token_ids)
        version = next(r for r in shown if r["id"] == rollout.id)
        assert version["metrics"]["rollout/num_action_tokens"] == len(rollout.token_ids)
        assert version["metrics"]["policy/logprob_gap"] < 1e-3
        # the service has closed, the mask of what it learned from is read from its results
        assert rollout.advantages.shape == rollout.token_ids.shape


def test_credit_by_session(by_session, tokenizer):
    ids = converse(by_session, "whole")
    deadline = time.monotonic() + 60
    while {by_session.get(f"/v1/rollouts/{id}").json()["state"] for id in ids} != {"rewarded"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    closed = by_session.post("/v1/sessions/whole/close")
    assert (closed.status_code, closed.json()) == (
        200,
        {"id": "whole", "closed": True, "turns": 2},
    )
    shown = [by_session.settled(id) for id in ids]
    assert [r["state"] for r in shown] == ["trained", "trained"]
    assert shown[0]["trained_version"] == shown[1]["trained_version"]
    first, second = stored(by_session, ids)
    check_history(first, second, tokenizer)
    print(f"--- the update of version {first.trained_version}")
    batch = check_mask([first, second], tokenizer)
    number = len(first.token_ids) + len(second.token_ids)
    metrics = shown[0]["metrics"]
    assert metrics["rollout/num_action_tokens"] == batch.num_actions == number
    assert metrics["rollout/num_trajectories"] == 1
    assert metrics["rollout/reward"] == first.reward + second.reward
    assert metrics["policy/logprob_gap"] < 1e-3


def test_three_turns_are_one_trajectory(endpoint, tokenizer):
    first, second, third = stored(endpoint, converse(endpoint, "three", QUESTIONS))
    check_history(first, second, tokenizer)
    check_history(second, third, tokenizer)
    assert [r.turn for r in (first, second, third)] == [0, 1, 2]
    check_mask([first, second, third], tokenizer)


def test_each_of_n_choices_goes_on_by_itself(endpoint, tokenizer):
    first, second = stored(endpoint, converse(endpoint, "choices", n=2))
    assert (second.parent_id, second.turn) == (first.id, 1)
    (other,) = stored(endpoint, [f"{second.id}.1"])
    assert (other.parent_id, other.turn, other.new_trajectory) == (first.id, 0, "branched")
    check_history(first, other, tokenizer)


def test_metadata_names_a_session_too(endpoint):
    id = endpoint.chat(metadata={"session_id": "by-metadata"}).json()["id"]
    assert endpoint.get(f"/v1/rollouts/{id}").json()["session_id"] == "by-metadata"


def test_a_history_that_the_client_changed_begins_a_trajectory(endpoint):
    headers = {"X-Session-Id": "changed"}
    endpoint.chat(headers=headers)
    history = [
        {"role": "user", "content": "Write about rain."},
        {"role": "assistant", "content": "Something that nobody said."},
        {"role": "user", "content": "Go on."},
    ]
    id = endpoint.chat(headers=headers, messages=history).json()["id"]
    rollout = endpoint.get(f"/v1/rollouts/{id}").json()
    assert (rollout["turn"], rollout["new_trajectory"]) == (0, "history_changed")
    assert endpoint.settled(id)["state"] == "trained"


def test_a_history_too_long_is_refused_with_the_numbers(endpoint):
    headers = {"X-Session-Id": "long"}
    messages = [{"role": "user", "content": "rain " * 300}]
    answer = endpoint.chat(headers=headers, messages=messages).json()
    said = answer["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "tea " * 300}]
    for stream in (False, True):
        refused = endpoint.chat(headers=headers, messages=messages, stream=stream)
        assert refused.status_code == 400, refused.text
        assert "512 tokens" in refused.json()["error"]["message"]


def test_closing_a_session_that_nobody_opened(endpoint):
    answer = endpoint.post("/v1/sessions/nobody/close")
    assert answer.status_code == 404
    assert "no session 'nobody'" in answer.json()["error"]["message"]


def test_an_idle_session_is_closed_and_learned_from(by_session):
    ids = converse(by_session, "idle")
    assert {by_session.settled(id, 90)["state"] for id in ids} == {"trained"}
    # and a turn after that stands by itself, with the same history
    with RolloutStore(f"sqlite:///{by_session.run_dir}/store.sqlite") as store:
        assert store.session("idle").close_reason == "idle"
        last = store.get(ids[-1])
    history = [
        *last.messages,
        {"role": "assistant", "content": last.answer},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    headers = {"X-Session-Id": "idle"}
    id = by_session.chat(headers=headers, messages=history, max_tokens=4).json()["id"]
    (late,) = stored(by_session, [id])
    assert (late.turn, late.new_trajectory, late.parent_id) == (0, "session_closed", ids[-1])
