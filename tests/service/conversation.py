"""Conversations through the official client, and what must hold of their turns, token by token."""

import openai

from online_sao.learner.batch import make_batch
from online_sao.store import RolloutStore

QUESTIONS = ("Write about rain.", "And about tea?", "Now both.")


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
    """The rollouts as the store has them, once each is judged and has gone as far as it goes."""
    for id in ids:
        endpoint.settled(id)
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
