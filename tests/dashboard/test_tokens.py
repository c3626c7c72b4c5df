import numpy as np
import pytest

from dashboard.tokens import find_tokenizer, load_pieces, shaded_html


def test_pieces_join_to_the_text(generator, tmp_path):
    file = tmp_path / "tokenizer.json"
    generator.write_tokenizer(file)
    pieces = load_pieces(file)
    ids = np.array([generator.WORDS[word] for word in ["Behold", "!", "The", "sealed"]])
    assert pieces(ids) == ["Behold", " !", " The", " sealed"]
    assert pieces(ids[:0]) == []


def test_a_character_of_several_tokens_is_shown_once(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: number for number, char in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("a☂b").ids
    assert load_pieces(tmp_path / "tokenizer.json")(np.array(ids)) == ["a", "", "", "☂", "b"]


def test_the_tokenizer_is_looked_for_in_the_models_folder_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONLINE_SAO_HOME", str(tmp_path / "home"))
    assert find_tokenizer("writer") is None
    assert find_tokenizer(None) is None
    cached = tmp_path / "home" / "models" / "writer-0123"
    cached.mkdir(parents=True)
    assert find_tokenizer("writer") is None
    (cached / "tokenizer.json").write_text("{}")
    assert find_tokenizer("writer") == cached / "tokenizer.json"
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text("{}")
    assert find_tokenizer(str(own)) == own / "tokenizer.json"
    assert find_tokenizer("writer", str(own)) == own / "tokenizer.json"
    assert find_tokenizer("writer", str(own / "tokenizer.json")) == own / "tokenizer.json"


def test_a_broken_tokenizer_is_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_pieces(tmp_path / "tokenizer.json") is None


def test_shades_follow_the_numbers_and_text_is_escaped():
    made = shaded_html(
        ["<b>", " x", "\n"], [1.0, -2.0, 0.0], [False, True, False], name="advantage"
    )
    assert "&lt;b&gt;" in made
    assert "<b>" not in made
    assert "rgba(230, 119, 0, 0.25)" in made  # half of the largest, so half of the deepest shade
    assert "rgba(0, 114, 178, 0.50)" in made
    assert 'title="advantage -2.000 (masked: outside the trust region)"' in made
    assert made.count("underline wavy") == 1
    assert "⏎<br>" in made


def test_shades_survive_numbers_that_are_not_finite():
    made = shaded_html(["a", "b"], [float("nan"), 0.0], [False, False], name="ratio")
    assert made.count("0.00)") == 2
