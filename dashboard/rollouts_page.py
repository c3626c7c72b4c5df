"""Answers, newest first; one opened, token by token."""

from __future__ import annotations

import argparse
from datetime import tzinfo
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import charts
from dashboard.headline import style_name
from dashboard.parts import (
    NOTHING,
    csv_button,
    draw,
    escape,
    local_times,
    shown_number,
    viewer_zone,
)
from dashboard.queries import Filters, StoreReader
from dashboard.tokens import find_tokenizer, load_pieces, shaded_html
from online_sao.errors import NotFoundError
from online_sao.types import Rollout, RolloutState

PAGE_SIZE = 50
SHADES = {
    "advantage": ("advantages", 0.0),
    "importance ratio": ("importance_ratios", 1.0),
    "value": ("values", 0.0),
    "behavior log-prob": ("behavior_logprobs", 0.0),
}


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = viewer_zone()
    filters = _filters(reader)
    before = (
        st.session_state.get("before_seq") if filters == st.session_state.get("filters") else None
    )
    st.session_state["filters"], st.session_state["before_seq"] = filters, before
    table = reader.rollouts(filters, before_seq=before, limit=PAGE_SIZE)
    if not len(table):
        if filters == Filters() and before is None:
            st.info("No answer has been recorded yet.", icon=":material/hourglass_empty:")
        else:
            st.info("No answer passes these filters.", icon=":material/filter_alt:")
        return
    shown = pd.DataFrame(
        {
            "rollout": table["seq"],
            "time": local_times(table["created_at"], zone),
            "reward": table["reward"],
            "style seen": table["detected_style"],
            "preferred": table["style"],
            "state": table["state"] + (": " + table["reason"]).fillna(""),
            "answer": table["answer"].str.slice(0, 160),
            "version": table["weight_version_end"],
            "tokens": table["num_action_tokens"],
        }
    )
    st.caption("Newest first. Choose a row to open the answer.")
    chosen = st.dataframe(
        shown,
        hide_index=True,
        placeholder=NOTHING,
        key=f"rollouts_{before}",
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "time": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss"),
            "reward": st.column_config.NumberColumn(format="%.2f"),
            "answer": st.column_config.TextColumn(width="large"),
        },
    )
    with st.container(horizontal=True):
        if st.button("Newest", disabled=before is None, icon=":material/first_page:"):
            st.session_state["before_seq"] = None
            st.rerun()
        if st.button("Older", disabled=len(table) < PAGE_SIZE, icon=":material/navigate_next:"):
            st.session_state["before_seq"] = int(table["seq"].iloc[-1])
            st.rerun()
        csv_button(table, "rollouts")
    number = st.number_input(
        "Or open the rollout of this number",
        1,
        value=None,
        step=1,
        key="rollout",
        bind="query-params",
    )
    rows = chosen.selection.rows if chosen else []
    if rows and rows[0] < len(table):
        number = int(table["seq"].iloc[rows[0]])
    try:
        _rollout(reader, options, number or int(table["seq"].iloc[0]), zone)
    except NotFoundError as error:
        st.warning(escape(error))


def _filters(reader: StoreReader) -> Filters:
    known = reader.known()
    with st.expander("Filter", icon=":material/filter_alt:"):
        a, b, c = st.columns(3)
        state = a.selectbox("State", [None, *(s.value for s in RolloutState)], format_func=_any)
        reason = b.selectbox("Reason", [None, *known["reasons"]], format_func=_any)
        reward = c.selectbox(
            "Reward",
            [None, "1", "0", "between", "none"],
            format_func=lambda r: {"between": "between 0 and 1", "none": "no reward"}.get(
                r, _any(r)
            ),
        )
        seen = a.selectbox("Style seen", [None, *known["styles"], "none"], format_func=_any)
        preferred = b.selectbox("Style preferred", [None, *known["styles"]], format_func=_any)
        version = c.number_input("Version that wrote it or came of it", 0, value=None, step=1)
        session = a.text_input("Session")
        text = b.text_input("Text in question or answer", help="In the newest 50,000 answers.")
    return Filters(
        state=state,
        reason=reason,
        reward=reward,
        detected_style=seen,
        preferred_style=preferred,
        version=None if version is None else int(version),
        session=session or None,
        text=text or None,
    )


def _any(choice: str | None) -> str:
    return "any" if choice is None else str(choice)


def _rollout(reader: StoreReader, options: argparse.Namespace, seq: int, zone: tzinfo) -> None:
    rollout = reader.rollout(seq)
    reason = f": {escape(rollout.reason)}" if rollout.reason else ""
    st.markdown(f"## Rollout {seq:,} ({rollout.state}{reason})")
    left, right = st.columns(2)
    with left:
        for message in rollout.messages or []:
            content = message.get("content")
            with st.container(border=True):
                st.caption(escape(message.get("role")))
                st.text(content if isinstance(content, str) else str(content))
        with st.container(border=True):
            st.caption("answer")
            st.text(rollout.answer or "(deleted)")
    with right:
        verdict = rollout.verdict
        if verdict is None:
            waiting = "waits for its verdict" if rollout.judge_state == "waiting" else "no verdict"
            st.markdown(f"**{waiting}**")
        else:
            marks = (
                f" = quality {verdict.quality:g} × style match {verdict.style:g}"
                if verdict.quality is not None and verdict.style is not None
                else f" (from {escape(verdict.source)})"
            )
            st.markdown(f"**Reward {verdict.reward:g}**{marks}")
            if verdict.rationale:
                st.text(verdict.rationale)
        # No markdown: what is copied from here, into the filter say, is what was recorded.
        st.text("\n".join(_facts(rollout, zone)))
        given = reader.feedback(seq)
        if len(given):
            st.dataframe(given.assign(at=local_times(given["at"], zone)), hide_index=True)
            csv_button(given, "feedback")
        if verdict and verdict.raw:
            with st.expander("What the judge wrote"):
                st.code(verdict.raw, language=None, wrap_lines=True)
    _tokens(reader, options, rollout)


def _facts(rollout: Rollout, zone: tzinfo) -> list[str]:
    verdict, preference = rollout.verdict, rollout.preference
    spans = ", ".join(f"{s.version} (tokens {s.start}–{s.end - 1})" for s in rollout.weight_spans)
    facts = [
        f"recorded {rollout.created_at.astimezone(zone):%Y-%m-%d %H:%M:%S}"
        if rollout.created_at
        else "",
        f"preferred: {style_name(preference.style)} of {', '.join(preference.pool)}"
        if preference
        else "no preference",
        f"style seen: {verdict.detected_style or 'none'}" if verdict else "",
        f"judge: {verdict.model}, {shown_number(verdict.latency_s, '.2f')} s"
        if verdict and verdict.model
        else "",
        f"written by version {spans}",
        f"learned from in version {rollout.trained_version}"
        if rollout.trained_version is not None
        else "",
        f"temperature {rollout.temperature:g}, ended by {rollout.finish_reason}, "
        f"{shown_number(rollout.latency_s, '.2f')} s",
        f"session {rollout.session_id}" if rollout.session_id else "",
        f"id {rollout.id}",
    ]
    return [fact for fact in facts if fact]


def _tokens(reader: StoreReader, options: argparse.Namespace, rollout: Rollout) -> None:
    count = len(rollout.token_ids)
    if count == 0:
        st.caption("Its tokens were deleted.")
        return
    available = [name for name, (field, _) in SHADES.items() if getattr(rollout, field) is not None]
    shade = st.segmented_control(
        "Shade tokens by", available, default=available[0], required=True, key="shade"
    )
    field, middle = SHADES[shade or available[0]]
    numbers = np.asarray(getattr(rollout, field), float)
    if field == "values":
        middle = float(np.nanmean(numbers))
    masked = _masked(rollout, reader.run_config().get("learner", {}))
    file = find_tokenizer(reader.model(), options.tokenizer)
    pieces = _pieces(str(file)) if file else None
    if pieces:
        texts = pieces(rollout.token_ids)
        st.html(shaded_html(texts, numbers.tolist(), masked.tolist(), middle=middle, name=shade))
        st.caption(
            f"Orange is above {middle:.2g}, blue below; the deeper, the further. Underlined tokens "
            "were outside the trust region and taught nothing. Hover for numbers."
        )
    else:
        texts = [""] * count
        st.caption(
            "No tokenizer.json was found, so tokens show as numbers; give its place with "
            "`online-sao dashboard --tokenizer PATH`."
        )
    table = pd.DataFrame(
        {
            "position": range(count),
            "token_id": rollout.token_ids,
            "text": texts,
            "masked": masked,
            **{
                name: getattr(rollout, name)
                for name, _ in SHADES.values()
                if getattr(rollout, name) is not None
            },
        }
    )
    draw(charts.tokens_chart(table, field, middle), f"{shade} of each token")
    with st.expander("Numbers of every token"):
        st.dataframe(table, hide_index=True)
        csv_button(table, f"tokens_{rollout.seq}")


def _masked(rollout: Rollout, settings: dict[str, Any]) -> np.ndarray:
    """Tokens that the policy loss left out, as far as the run's settings tell."""
    ratios = rollout.importance_ratios
    low, high = settings.get("eps_low"), settings.get("eps_high")
    if ratios is None or settings.get("objective", "dis") != "dis" or low is None or high is None:
        return np.zeros(len(rollout.token_ids), bool)
    return (ratios <= 1 - low) | (ratios >= 1 + high)


@st.cache_resource
def _pieces(path: str) -> Any:
    return load_pieces(find_tokenizer(None, path)) if path else None
