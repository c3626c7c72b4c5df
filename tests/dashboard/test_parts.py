"""What keeps a text of unknown origin from being read as markdown."""

import html
import re

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dashboard.parts import WORD_JOINER, escape, inert

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
# Streamlit's page looks for these when markdown has been read and backslashes are gone: bare
# addresses of three kinds (mdast-util-gfm-autolink-literal), icons and emoji.
READ_LATER = [
    r"(?i)(https?://|www(?=\.))([-.\w]+)",
    r"(?<![^\s!-/:-@\[-`{-~])([-.\w+]+)@([-\w]+(?:\.[-\w]+)+)",
    r":[\w+-]+:",
]


def read(escaped):
    """The text that is shown; fails if anything but a text is."""
    (inner,) = re.findall(r"\A<p>([^<]*)</p>\n\Z", MARKDOWN.render(escaped))
    text = html.unescape(inner)
    assert not any(re.search(pattern, text, re.ASCII) for pattern in READ_LATER)
    assert ":material/" not in escaped  # replaced before anything is read
    return text.replace(WORD_JOINER, "")


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://evil.example/x.png)",
        "[x](https://evil.example)",
        "http://evil.example and HTTPS://evil.example",
        "www.evil.example",
        "mail me@evil.example now",
        "<img src=x> <http://evil.example>",
        "[x]: http://evil.example",
        ":red[x] :material/home: :material_home: :streamlit: :smile: ::+1:",
        "$x$ `x` **x** __x__ ~~x~~ \\![x](y) &lt; &#33;",
        "# x",
        "- x",
        "1. x",
        "1) x",
        "> x",
        "=====",
        "---",
        "| a | b |",
    ],
)
def test_a_text_is_shown_as_it_is(text):
    assert read(escape(text)) == text


def test_it_is_one_line():
    assert read(escape("a\n\n# b\r\n    c\u2028d ")) == "a # b c d"


def test_between_stars_it_stays_in_between():
    shown = MARKDOWN.render(f"**{escape('** (x) [y](z)!')}**")
    assert shown == "<p><strong>** (x) [y](z)!</strong></p>\n"


def test_what_needs_no_escape_is_copied_as_it_is_shown():
    for text in ("user-42", "chat:42", "a b, c: d"):
        assert WORD_JOINER not in escape(text)


ANY_TEXT = st.text(st.characters(exclude_categories=["C"]))
MUCH_PUNCTUATION = st.text(st.sampled_from(list("!-/:-@[`{~()]<>#*_\\w.:@ 1a\n")))


@given((ANY_TEXT | MUCH_PUNCTUATION).filter(str.strip))
def test_any_text_is_shown_as_it_is(text):
    assert read(escape(text)) == " ".join(text.split())


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1"])
def test_a_downloaded_table_holds_no_formula(text):
    table = pd.DataFrame({"text": [text, None], "number": [-1.5, 2.0]})
    table["when"] = pd.to_datetime(["2026-01-02 03:04:05", None])
    held = inert(table)
    assert held["text"].iloc[0] == f"'{text}"
    assert held["text"].isna().tolist() == [False, True]
    assert held.drop(columns="text").equals(table.drop(columns="text"))


def test_a_downloaded_table_is_as_it_was():
    table = pd.DataFrame({"text": ["a = b", ""], "kind": pd.Categorical(["x", "y"])})
    assert inert(table).to_csv() == table.to_csv()
    assert inert(table.iloc[:0]).columns.tolist() == ["text", "kind"]
