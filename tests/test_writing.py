"""The writing task: topics, prompts, phrasebook, warm-start examples."""

import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from online_sao.errors import ConfigError
from online_sao.writing import (
    build_messages,
    load_phrasebook,
    load_topics,
    pretraining_prompts,
    styled_answer,
    system_prompt,
    topic_stream,
    warm_start_examples,
)

STYLES = ("academic", "cute", "chuunibyou", "classical")
POOL = ("academic", "cute", "chuunibyou")
TOPICS = load_topics()
BOOK = load_phrasebook()
ENDS = (".", "!", "?")


def pool_in(system: str) -> list[str]:
    """The styles that a system prompt offers, in its order."""
    shown = {name: style for style, name in TOPICS.styles.items()}
    found = re.findall("|".join(shown), system)
    return [shown[name] for name in found]


# Topics


def test_shipped_topics():
    assert tuple(TOPICS.styles) == STYLES
    assert len(TOPICS.training) >= 48
    assert len(TOPICS.heldout) >= 24
    assert not set(TOPICS.training) & set(TOPICS.heldout)
    for topic in (*TOPICS.training, *TOPICS.heldout):
        assert len(set(TOPICS.details[topic])) == 3
        assert all(detail.startswith("the ") for detail in TOPICS.details[topic])


def test_heldout_topics_are_new_subjects_not_new_wordings():
    """No noun or verb of a held-out topic occurs in a training topic."""
    function_words = {"a", "an", "the", "of", "in", "on", "at", "for", "from", "to", "with"}

    def content(topics):
        words = {word for topic in topics for word in re.findall(r"[a-z]+", topic)}
        return words - function_words

    assert content(TOPICS.heldout) & content(TOPICS.training) == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("system = 'Choose.'", "must be a text that contains {pool}"),
        ("users = ['Write.']", "must list texts that contain {topic}"),
        ("training = []", "'training' must name at least one topic"),
        ("training = ['tea', 'tea']", "names a topic twice"),
        ("training = ['sea']", "'sea' is both a training and a held-out topic"),
        ("extra = 1", "unknown setting 'extra'"),
        ("styles = {}", "[styles] must give each style"),
        ("training = {tea = 3}", "'tea' needs a list of details"),
        ("training = [", "is not valid TOML"),
    ],
)
def test_bad_topic_file(tmp_path, change, message):
    lines = {
        "system": "system = 'One of {pool}.'",
        "users": "users = ['About {topic}.']",
        "styles": "styles = {cute = 'Cute'}",
        "training": "training = ['tea']",
        "heldout": "heldout = ['sea']",
    }
    lines[change.split()[0]] = change
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines.values()))
    with pytest.raises(ConfigError) as caught:
        load_topics(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_topic_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "system = 'One of {pool}.'\nusers = ['About {topic}.']\n"
        "training = ['tea', 'rain']\nheldout = ['sea']\n[styles]\ncute = 'Cute'\nblunt = 'Blunt'\n"
    )
    topics = load_topics(path)
    assert topics.name == "mine"
    messages = build_messages("tea", ("blunt", "cute"), 0, topics=topics)
    assert messages[0]["content"] in ("One of Blunt, Cute.", "One of Cute, Blunt.")
    assert messages[1] == {"role": "user", "content": "About tea."}
    with pytest.raises(ConfigError, match="has no details"):
        styled_answer("tea", "cute", random.Random(0), topics=topics)
    with pytest.raises(ConfigError, match="no style 'blunt'"):
        warm_start_examples(4, 0, topics=topics)


def test_unknown_topic_set_and_style():
    with pytest.raises(ConfigError, match="There is no topic set 'poems'"):
        load_topics("poems")
    with pytest.raises(ConfigError, match=r"Unknown style 'rude'.* it has academic, cute"):
        system_prompt(("rude",))


# Prompts


def test_system_prompt_names_the_pool_in_the_order_given_or_drawn():
    assert pool_in(system_prompt(POOL)) == list(POOL)
    assert pool_in(system_prompt(POOL[::-1])) == list(POOL[::-1])
    drawn = {tuple(pool_in(system_prompt(POOL, random.Random(n)))) for n in range(60)}
    assert drawn == set(itertools.permutations(POOL))


def test_messages_depend_on_the_seed_alone():
    one = build_messages("making tea", POOL, 5)
    assert one == build_messages("making tea", POOL, 5)
    assert [message["role"] for message in one] == ["system", "user"]
    assert "making tea" in one[1]["content"]
    wordings = {build_messages("making tea", POOL, n)[1]["content"] for n in range(60)}
    assert wordings == {user.replace("{topic}", "making tea") for user in TOPICS.users}


def test_topic_stream_visits_all_before_any_again():
    stream = topic_stream(TOPICS.training, 0)
    first = list(itertools.islice(stream, len(TOPICS.training)))
    second = list(itertools.islice(stream, len(TOPICS.training)))
    assert sorted(first) == sorted(second) == sorted(TOPICS.training)
    assert first != second


def test_pretraining_prompts():
    prompts = pretraining_prompts(POOL, 100, seed=1)
    assert len(prompts) == 100
    assert prompts[:32] == pretraining_prompts(POOL, 32, seed=1)
    assert prompts != pretraining_prompts(POOL, 100, seed=2)
    for messages in prompts:
        assert set(pool_in(messages[0]["content"])) == set(POOL)
        assert any(topic in messages[1]["content"] for topic in TOPICS.training)
        assert not any(topic in messages[1]["content"] for topic in TOPICS.heldout)


# Phrasebook


def test_phrasebook_has_all_styles_with_enough_of_each_part():
    assert tuple(BOOK) == STYLES
    for parts in BOOK.values():
        assert len(parts.openings) == len(set(parts.openings)) >= 3
        for sentences in (parts.middles, parts.closings):
            assert len(sentences) == len(set(sentences)) >= 12
            assert all(sentence.endswith(ENDS) for sentence in sentences)
            # one sentence each: its only end mark is the last character
            assert not any(re.search(r"[.!?] ", sentence) for sentence in sentences)
        assert all("{topic}" in sentence for sentence in parts.openings)
        assert all("{detail}" in s or "{Detail}" in s for s in parts.middles)
        assert not any("{" in sentence for sentence in parts.closings)


def test_first_words_tell_the_styles_apart():
    first = {style: {s.split()[0] for s in parts.openings} for style, parts in BOOK.items()}
    for one, other in itertools.combinations(STYLES, 2):
        assert first[one] & first[other] == set()
    assert all(len(words) >= 3 for words in first.values())


def test_no_sentence_is_shared_between_styles():
    sentences = Counter(
        sentence
        for parts in BOOK.values()
        for sentence in (*parts.openings, *parts.middles, *parts.closings)
    )
    assert max(sentences.values()) == 1


@pytest.mark.parametrize("style", STYLES)
def test_answers_for_every_topic(style):
    for topic in (*TOPICS.training, *TOPICS.heldout):
        answers = {styled_answer(topic, style, random.Random(n)) for n in range(8)}
        assert len(answers) >= 7
        for answer in answers:
            assert topic in answer
            assert any(detail[4:] in answer for detail in TOPICS.details[topic])
            assert answer.endswith(ENDS)
            assert answer[0].isupper() or answer.startswith("'Tis")
            assert "{" not in answer
            # 17 to 40 words are about 24 to 50 tokens: never cut by 56 tokens
            assert 17 <= len(answer.split()) <= 40
            assert len(re.findall(r"[.!?]( |$)", answer)) in (2, 3)


def test_bad_phrasebook(tmp_path):
    path = tmp_path / "book.toml"
    for text, message in (
        ("", "has no style"),
        ("[cute]\nopenings = ['a']", "needs openings, middles and closings"),
        ("[cute]\nopenings = []\nmiddles = ['b']\nclosings = ['c']", "cute.openings must be"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_phrasebook(path)


# Warm start


def test_warm_start_examples_are_balanced_distinct_and_on_training_topics():
    examples = warm_start_examples(320, seed=0)
    assert len(examples) == 320
    assert len({example.answer for example in examples}) == 320
    # 12 pairs of (pool of three, style of it); 320 = 26 * 12 + 8: each comes 26 or 27 times
    pairs = Counter((example.pool, example.style) for example in examples)
    assert set(pairs.values()) == {26, 27}
    assert len(pairs) == 12
    topics = Counter(example.topic for example in examples)
    assert set(topics) == set(TOPICS.training)
    assert max(topics.values()) - min(topics.values()) <= 1
    for example in examples:
        assert example.style in example.pool
        assert set(pool_in(example.messages[0]["content"])) == set(example.pool)
        assert example.topic in example.messages[1]["content"]
        assert example.topic in example.answer
        for message in example.messages:
            assert not any(topic in message["content"] for topic in TOPICS.heldout)


def test_warm_start_names_styles_in_every_place_of_the_pool():
    """The style of the answer must not be told by its place in the prompt."""
    places = Counter(
        pool_in(example.messages[0]["content"]).index(example.style)
        for example in warm_start_examples(600, seed=3)
    )
    # 200 expected in each place, standard deviation sqrt(600 * 1/3 * 2/3) = 11.5
    assert all(150 < count < 250 for count in places.values())


def test_warm_start_is_a_function_of_the_seed_in_any_process():
    script = (
        "import hashlib, json; from online_sao.writing import warm_start_examples\n"
        "text = json.dumps([[e.messages, e.answer] for e in warm_start_examples(50, 4)])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert warm_start_examples(50, 4) != warm_start_examples(50, 5)
    assert warm_start_examples(50, 4) == warm_start_examples(60, 4)[:50]


def test_too_many_examples_for_a_small_phrasebook(tmp_path):
    path = tmp_path / "book.toml"
    path.write_text(
        "\n".join(
            f"[{style}]\nopenings = ['{style} {{topic}}.']\nmiddles = ['{{detail}}.']\n"
            "closings = ['x.']"
            for style in STYLES
        )
    )
    with pytest.raises(ConfigError, match="too small"):
        warm_start_examples(4000, 0, phrasebook=load_phrasebook(path))


def test_importing_it_loads_nothing_heavy():
    script = (
        "import sys, online_sao.writing, online_sao.scenario\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'litellm', 'sqlalchemy', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
