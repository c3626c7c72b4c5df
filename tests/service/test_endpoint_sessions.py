"""Turns of a session on a real endpoint that learns from each by itself.

Token by token: what was seen and sampled is what is learned from, and only what was sampled.
"""

import pytest
from conversation import QUESTIONS, check_history, check_mask, converse, stored

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


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


def test_three_turns_are_one_trajectory(endpoint, tokenizer):
    first, second, third = stored(endpoint, converse(endpoint, "three", QUESTIONS))
    check_history(first, second, tokenizer)
    check_history(second, third, tokenizer)
    assert [r.turn for r in (first, second, third)] == [0, 1, 2]
    check_mask([first, second, third], tokenizer)


def test_each_of_n_choices_goes_on_by_itself(endpoint, tokenizer):
    first, second = stored(endpoint, converse(endpoint, "choices", n=2))
    (other,) = stored(endpoint, [f"{second.id}.1"])
    assert second.parent_id == other.parent_id == first.id
    # Whichever ends first goes on with the trajectory; the other branches off.
    places = {(choice.turn, choice.new_trajectory) for choice in (second, other)}
    assert places == {(1, None), (0, "branched")}
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
    messages = [{"role": "user", "content": "rain " * 80}]
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
