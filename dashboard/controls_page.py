"""What acts on the service: each asks once and says what happened."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, tzinfo
from typing import Any

import streamlit as st

from dashboard.control import ControlError, ServiceClient
from dashboard.headline import clock, style_name
from dashboard.parts import escape, shown_number, viewer_zone
from dashboard.queries import Kept, Phase, StoreReader


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = viewer_zone()
    st.caption(f"These act on the service at `{options.url}`; each asks once.")
    key = st.text_input(
        "Admin key",
        type="password",
        key="admin_key",
        help="The service's ONLINE_SAO_ADMIN_KEY; leave empty if it has none. Not stored.",
    )
    client = ServiceClient(options.url, key)
    done = st.session_state.get("done")
    if done:
        (st.success if done[0] else st.error)(escape(done[1]))
    _confirmation(client)
    try:
        learning = client.learning()
    except ControlError as error:
        st.warning(escape(error), icon=":material/cloud_off:")
        learning = None
    if learning is not None:
        paused = learning.get("paused")
        reason = learning.get("pause_reason")
        why = f" ({escape(reason)})" if paused and reason else ""
        st.markdown(
            f"**Now:** learning is {'paused' + why if paused else 'on'}, version "
            f"{shown_number(learning.get('serving_version'), ',d')} serves."
        )
        with st.expander("Everything the service says"):
            st.code(json.dumps(learning, indent=2), language=None)
    phases = reader.phases()
    current = phases[-1] if phases else None
    styles = reader.known()["styles"]
    off = learning is None
    st.markdown("## Preference")
    with st.form("preference"):
        style = st.selectbox(
            "Reward this style",
            styles,
            index=styles.index(current.style) if current else None,
            format_func=style_name,
            accept_new_options=True,
            key="style",
        )
        pool = st.multiselect(
            "Styles the judge tells apart",
            styles,
            default=list(current.pool) if current else [],
            format_func=style_name,
            accept_new_options=True,
            key="pool",
        )
        note = st.text_input("Note (optional)", key="note")
        if st.form_submit_button("Switch the preference", disabled=off):
            if not style or style not in pool:
                _finish(False, "The rewarded style must be one of those the judge tells apart.")
            else:
                _ask_first(
                    f"Reward {style_name(style)} (of {', '.join(map(style_name, pool))}) from "
                    "now on?",
                    ("preference", style, list(pool), note or None),
                )
    st.markdown("## Learning")
    with st.container(horizontal=True):
        if st.button("Pause learning", icon=":material/pause:", disabled=off):
            _ask_first("Pause learning? Answers go on with the present weights.", ("pause",))
        if st.button("Resume learning", icon=":material/play_arrow:", disabled=off):
            _ask_first("Resume learning?", ("resume",))
    st.markdown("## Roll back")
    kept = reader.kept_versions()
    if not kept:
        st.caption("No checkpoint is kept yet, so there is nothing to roll back to.")
    names = {one.version: _kept(one, current, zone) for one in kept}
    serving = (learning or {}).get("serving_version")
    older = [one.version for one in kept if one.version != serving]
    if older:
        version = st.selectbox(
            "To version", older, key="rollback_version", format_func=names.__getitem__
        )
        if st.button("Roll back", icon=":material/undo:", disabled=off):
            _ask_first(
                f"Go back to version {version}? What was learned after it is given up.",
                ("rollback", int(version)),
            )
    elif kept:
        st.caption("The only checkpoint is of the version that serves.")
    st.markdown("## Keep a version")
    st.caption(
        "A checkpoint is what can be gone back to. Old ones are thinned out to save disk; a pinned "
        "one is kept until it is unpinned."
    )
    pinned = {one.version for one in kept if one.pinned}
    chosen = st.selectbox(
        "Version to keep", list(names), key="pin_version", format_func=names.__getitem__
    )
    with st.container(horizontal=True):
        if st.button("Checkpoint now", icon=":material/save:", disabled=off):
            _ask_first("Write the present weights as a checkpoint?", ("checkpoint",))
        if st.button(
            "Pin", icon=":material/keep:", disabled=off or chosen is None or chosen in pinned
        ):
            _ask_first(f"Keep version {chosen} until it is unpinned?", ("pin", chosen, True))
        if st.button("Unpin", icon=":material/keep_off:", disabled=off or chosen not in pinned):
            _ask_first(
                f"Let version {chosen} be thinned out like the others?", ("pin", chosen, False)
            )


def _kept(one: Kept, phase: Phase | None, zone: tzinfo) -> str:
    """A version as an operator chooses it: when it was made, and under which preference."""
    parts = [f"{one.version:,}", clock(one.created_at, zone)]
    if phase is not None and one.created_at < phase.started_at:
        parts.append(f"before {style_name(phase.style)}")
    if one.pinned:
        parts.append("pinned")
    return " · ".join(parts)


def _ask_first(question: str, action: tuple[Any, ...]) -> None:
    st.session_state["asked"] = (question, action)
    st.session_state["done"] = None
    st.rerun()


def _confirmation(client: ServiceClient) -> None:
    asked = st.session_state.get("asked")
    if asked is None:
        return
    question, action = asked
    with st.container(border=True):
        st.markdown(f"**{escape(question)}**")
        with st.container(horizontal=True):
            yes = st.button("Yes", type="primary", key="yes")
            if st.button("Cancel", key="cancel"):
                _finish(True, "Nothing was changed.")
    if not yes:
        return
    try:
        with st.spinner("The service is at it"):
            said = _act(client, action)
    except ControlError as error:
        _finish(False, str(error))
    else:
        _finish(True, said)


def _act(client: ServiceClient, action: tuple[Any, ...]) -> str:
    at = clock(datetime.now(UTC), viewer_zone())
    kind, *rest = action
    if kind == "preference":
        style, pool, note = rest
        client.set_preference(style, pool, note)
        return f"{style_name(style)} is preferred since {at}."
    if kind == "pause":
        client.pause()
        return f"Learning is paused since {at}."
    if kind == "resume":
        client.resume()
        return f"Learning goes on since {at}."
    if kind == "checkpoint":
        return f"Version {client.checkpoint().get('version')} has a checkpoint since {at}."
    if kind == "pin":
        number, pinned = rest
        client.pin(number, pinned)
        return f"Version {number} is {'pinned' if pinned else 'no longer pinned'} since {at}."
    answer = client.rollback(rest[0])
    made = answer.get("version")
    new = f" as version {made}" if made is not None else ""
    return f"The weights of version {rest[0]} serve again{new} since {at}."


def _finish(well: bool, sentence: str) -> None:
    st.session_state["asked"] = None
    st.session_state["done"] = (well, sentence)
    st.rerun()
