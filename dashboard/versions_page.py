"""What happened, weight versions, and two of them side by side."""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import streamlit as st

from dashboard.headline import style_name
from dashboard.parts import NOTHING, csv_button, escape, local_times, shown_number, viewer_zone
from dashboard.queries import StoreReader

QUESTION_CHARS = 200  # of a question that are shown above its answers


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = viewer_zone()
    table = reader.versions()
    if not len(table):
        st.info("There is no weight version yet.", icon=":material/hourglass_empty:")
        return
    st.markdown("## What happened")
    events = reader.events()
    if events:
        happened = pd.DataFrame(
            {
                "time": local_times(pd.Series([e.created_at for e in events]), zone),
                "what": [e.kind for e in events],
                "version": pd.array([e.weight_version for e in events], dtype="Int64"),
                "details": [_details(e.data) for e in events],
            }
        )
        st.dataframe(
            happened,
            hide_index=True,
            height=220,
            column_config={
                "time": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss"),
                "details": st.column_config.TextColumn(width="large"),
            },
        )
        csv_button(happened, "events")
    else:
        st.caption("No switch, pause, rollback or warning yet.")
    st.markdown("## Weight versions")
    st.caption(
        f"The newest {len(table)}. One with a checkpoint can be rolled back to (Controls); one "
        "that is abandoned lies on a line that a rollback left."
    )
    shown = table.assign(
        created_at=local_times(table["created_at"], zone),
        published_at=local_times(table["published_at"], zone),
    ).drop(columns="run_id")
    st.dataframe(
        shown,
        hide_index=True,
        placeholder=NOTHING,
        height=300,
        column_config={
            "created_at": st.column_config.DatetimeColumn("made", format="MM-DD HH:mm:ss"),
            "published_at": st.column_config.DatetimeColumn(
                "serving since", format="MM-DD HH:mm:ss"
            ),
            "kl_to_start": st.column_config.NumberColumn("KL to start", format="%.3f"),
            "masked_fraction": st.column_config.NumberColumn("masked", format="%.3f"),
            "explained_variance": st.column_config.NumberColumn("expl. variance", format="%.2f"),
            "reward": st.column_config.NumberColumn(format="%.2f"),
            "seconds": st.column_config.NumberColumn("update, s", format="%.2f"),
        },
    )
    csv_button(table, "versions")
    st.markdown("## Compare two versions")
    numbers = [int(number) for number in table["version"]]
    left, right = st.columns(2)
    one = left.selectbox("Version", numbers, index=min(len(numbers) - 1, 100), key="one")
    two = right.selectbox("with version", numbers, index=0, key="two")
    metrics = [reader.version_metrics(number) for number in (one, two)]
    names = [key for key in dict.fromkeys([*metrics[0], *metrics[1]]) if "/" in key]
    if names:
        compared = pd.DataFrame(
            {
                "metric": names,
                f"version {one}": [metrics[0].get(name) for name in names],
                f"version {two} ": [metrics[1].get(name) for name in names],
            }
        )
        st.dataframe(compared, hide_index=True, height=300, placeholder=NOTHING)
        csv_button(compared, "comparison")
    _side_by_side(reader, int(one), int(two))


def _side_by_side(reader: StoreReader, one: int, two: int) -> None:
    """Answers of two versions, to the same questions if there are any."""
    same = reader.same_prompts(one, two)
    if not len(same.answers):
        st.caption(
            "Both have answered no question in common, so these are the first answers from each "
            "version on, to different questions."
        )
        for side, number in zip(st.columns(2), (one, two), strict=True):
            with side:
                st.markdown(f"**From version {number} on**")
                answers = reader.answers_of(number)
                if not len(answers):
                    st.caption("None was recorded.")
                for answer in answers.itertuples():
                    _answer(
                        answer.rollout, answer.version, answer.style, answer.reward, answer.answer
                    )
        return
    kind = "held-out questions" if same.held_out else "questions that clients asked of both"
    st.caption(
        f"{same.questions} {kind}; {len(same.answers)} are shown. Few questions are asked of one "
        "version, so each side shows the answer of the version nearest to the chosen one."
    )
    for row in same.answers.itertuples():
        question = " ".join(row.question.split())
        st.markdown(f"**{escape(question[:QUESTION_CHARS])}**")
        left, right = st.columns(2)
        with left:
            _answer(row.rollout_one, row.version_one, row.style_one, row.reward_one, row.answer_one)
        with right:
            _answer(row.rollout_two, row.version_two, row.style_two, row.reward_two, row.answer_two)
    csv_button(same.answers, "answers")


def _answer(rollout: int, version: int, style: Any, reward: Any, answer: str) -> None:
    with st.container(border=True):
        st.text(answer or "(deleted)")
        seen = style_name(style) if isinstance(style, str) else "not judged"
        st.caption(
            f"version {version:,}, rollout {rollout:,}; style seen: {escape(seen)}, reward "
            f"{shown_number(reward, '.2f')}"
        )


def _details(data: dict[str, Any]) -> str:
    parts = []
    for key, value in data.items():
        if value is None:
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        parts.append(f"{key}: {shown}")
    return "; ".join(parts)
