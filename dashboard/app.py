"""Dashboard of a learning endpoint: layout only.

    streamlit run dashboard/app.py -- --store sqlite:///path/store.sqlite --url http://127.0.0.1:8000

Figures come from the store (dashboard/queries.py, read-only), so they are there when the
service is down; the controls go to the service by HTTP (dashboard/control.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import charts
from dashboard.control import ControlError, ServiceClient
from dashboard.headline import (
    FEWEST_UPDATES,
    RECENT,
    advice,
    checks,
    clock,
    headline,
    learning_word,
    style_name,
)
from dashboard.metrics import GROUPS, OURS, RECENT_UPDATES, Bound, Metric, bounds
from dashboard.queries import Filters, Kept, Phase, Situation, StoreReader
from dashboard.runs import (
    find_runs,
    phases_of,
    rolling_rewards,
    runs_table,
    same_phases,
    style_shares,
    styles_of,
)
from dashboard.tokens import find_tokenizer, load_pieces, shaded_html
from online_sao.config import Config
from online_sao.errors import NotFoundError, ScenarioError, StoreError
from online_sao.scenario import Results, read_results
from online_sao.types import Rollout, RolloutState

REFRESH_S = 3
PAGE_SIZE = 50
NOTHING = "–"  # in a table where there is no number
RANGES = {"last 200": 200, "last 1,000": 1000, "last 10,000": 10_000, "all": None}
# Streamlit greys out what is being refreshed, which flickers every few seconds. Its captions,
# chart texts, chosen values and primary buttons have too little contrast in one theme or the other.
STYLE = """<style>
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
[data-testid="stMetricValue"] { font-size: 1.5rem; }
.stMainBlockContainer { padding-top: 2.5rem; padding-bottom: 3rem; }
.stMainBlockContainer h1 { font-size: 1.6rem; padding: 0 0 0.4rem; }
.stMainBlockContainer h2 { font-size: 1.2rem; padding: 0.6rem 0 0.5rem; }
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] p {
  color: inherit; opacity: 0.88; }
[data-testid="stVegaLiteChart"] svg text { fill: currentColor !important; }
[data-tag] { background: #6D5BD0 !important; }
button[kind="primary"] { background: #6D5BD0; border-color: #6D5BD0; color: white; }
</style>"""
SHADES = {
    "advantage": ("advantages", 0.0),
    "importance ratio": ("importance_ratios", 1.0),
    "value": ("values", 0.0),
    "behavior log-prob": ("behavior_logprobs", 0.0),
}


def main() -> None:
    st.set_page_config(page_title="online_sao", layout="wide")
    options = _options()
    st.html(STYLE)
    with st.container(
        horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"
    ):
        st.markdown("# online_sao", width="content")
        st.caption(f"Times in {_zone()}", width="content")
        live = st.toggle(f"Refresh every {REFRESH_S} s", value=True, key="live", width="content")
    page = st.segmented_control(
        "Page",
        [*list(PAGES)[:-1], RUNS, list(PAGES)[-1]],
        default=next(iter(PAGES)),
        required=True,
        key="page",
        bind="query-params",
        label_visibility="collapsed",
    )
    if page == RUNS:
        runs_page(options)
        return
    try:
        reader = _reader(options.store)
        if not reader.is_there():
            _wait_for_store(reader)
            return
        show, refreshes = PAGES[page]
        every = REFRESH_S if live and refreshes else None
        st.fragment(_guarded, run_every=every)(show, reader, options)
    except StoreError as error:
        st.error(str(error), icon=":material/database_off:")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="streamlit run dashboard/app.py --", allow_abbrev=False)
    parser.add_argument("--store", default=os.environ.get("ONLINE_SAO_STORE_URL"))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service")
    parser.add_argument("--runs", default="runs", help="folder of simulations' results")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder")
    options = parser.parse_known_args(sys.argv[1:])[0]
    options.store = options.store or Config().store_url
    return options


@st.cache_resource
def _reader(url: str) -> StoreReader:
    return StoreReader(url)


@st.cache_data(ttl=10, show_spinner=False)  # counts every rollout
def _states(url: str) -> pd.DataFrame:
    return _reader(url).states()


@st.cache_resource
def _pieces(path: str) -> Any:
    return load_pieces(find_tokenizer(None, path)) if path else None


def _guarded(show: Callable[..., None], reader: StoreReader, options: argparse.Namespace) -> None:
    """A page; a store that fails in the middle is one sentence, and tried again."""
    try:
        show(reader, options)
    except StoreError as error:
        st.error(str(error), icon=":material/database_off:")


def _wait_for_store(reader: StoreReader) -> None:
    st.info(
        f"There is no store at {reader.place} yet. It is made when the service starts for the "
        "first time (make serve). This page opens by itself then.",
        icon=":material/hourglass_empty:",
    )

    @st.fragment(run_every=REFRESH_S)
    def look() -> None:
        if reader.is_there():
            st.rerun()

    look()


# ---- pages


def live_page(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = _zone()
    now = reader.situation()
    answers = ServiceClient(options.url).answers()
    sentence = headline(now, zone)
    hints = advice(now, service_answers=answers)
    box = st.warning if hints else st.success if now.num_scored else st.info
    box("  \n".join([f"**{sentence}**", *hints]), icon=":material/campaign:")
    phase = now.phase
    with st.container(horizontal=True):
        since = f" since {clock(phase.started_at, zone)}" if phase else ""
        _tile(f"Preferred{since}", style_name(phase.style) if phase else "none")
        _tile(
            f"Reward, last {RECENT}",
            _number(now.reward_now, ".2f"),
            "Mean reward (0 to 1) of the newest judged answers since the switch.",
        )
        _tile(
            "In that style",
            _number(now.preferred_share, ".0%"),
            f"Share of the last {RECENT} judged answers that the judge saw in that style.",
        )
        _tile(
            "Learning",
            learning_word(now, service_answers=answers),
            "Healthy: updates are made, the judge answers, and each figure under 'Is learning "
            "healthy?' lies inside its bound.",
        )
        _tile("Version", _number(now.version, ",d"), "The newest weights: one more per update.")
        _tile(
            "Updates / min",
            _number(now.updates_per_minute or 0, ".0f"),
            "Over the last two dozen updates; each learns from one answer.",
        )
        _tile(
            "Waiting",
            f"{now.waiting_for_judge} + {now.waiting_for_learner}",
            "Answers that wait for the judge + answers that wait for the learner.",
        )
        _tile("Service", "up" if answers else "down", options.url)
    if not now.num_rollouts:
        return
    _is_it_healthy(now)
    span = _range("rollouts", key="live_range")
    last = now.num_rollouts
    first = now.first_rollout if span is None else max(now.first_rollout, last - span + 1)
    phases = reader.phases()
    series = reader.series(first, last)
    if not len(series.marks):
        st.info("None of these answers has been judged yet.", icon=":material/hourglass_empty:")
        return
    styles = reader.known()["styles"]
    which = (phases, first, last, styles)
    st.markdown("## What it writes")
    _chart(
        charts.shares_chart(series.shares, *which),
        "Stacked shares of writing styles over rollouts, with the preferred style above",
    )
    part = f" ({series.sampled:,} of each looked at)" if series.sampled else ""
    st.caption(
        f"Styles the judge saw, in groups of {series.width:,} rollouts{part}; the strip on top is "
        "the style that was preferred, a dashed line a switch. The preferred colour should fill up."
    )
    left, right = st.columns(2)
    with left:
        st.markdown("## How well it does")
        _chart(charts.reward_chart(series, *which), "Mean reward, quality and style match")
        how = (
            "Means over 20 rollouts; each dot is one answer"
            if len(series.points)
            else f"Means over groups of {series.width:,} rollouts"
        )
        st.caption(
            f"{how}. Reward is quality times style match: when it is low, the lower of the two "
            "lines says why. Shaded in the preferred style's colour."
        )
    with right:
        st.markdown("## What it expects")
        if len(series.values.dropna()):
            _chart(charts.value_chart(series, *which), "Expected against earned reward")
            st.caption(
                "The critic's expectation before an answer, against what was earned. They part at "
                "a switch and should meet again within a few dozen rollouts."
            )
        else:
            st.caption("No values yet: nothing was learned in this range, or without a critic.")


def health_page(reader: StoreReader, options: argparse.Namespace) -> None:
    span = _range("updates", key="health_range")
    table = reader.health(span)
    states = _states(options.store)
    if len(table):
        note = f"Versions {table.index[0]:,} to {table.index[-1]:,}"
        step = round((table.index[-1] - table.index[0]) / max(len(table) - 1, 1))
        if step > 1:
            note += f", one in {step:,}"
        st.caption(
            f"{note}. Dots are updates, lines means over {RECENT_UPDATES} dots; an upright dashed "
            "line is a switch of the preference, a level orange one the bound of a figure."
        )
        limits = bounds(reader.run_config())
        phases = reader.phases()
        switches = [p.weight_version for p in phases[1:] if p.weight_version is not None]
        for group in GROUPS:
            shown = [m for m in group.metrics if m.key in table and table[m.key].notna().any()]
            extra = "seconds/total" in [m.key for m in shown]
            if not shown:
                continue
            st.markdown(f"## {group.title}")
            columns = st.columns(2)
            for number, metric in enumerate(shown):
                with columns[number % 2]:
                    _metric(table, metric, limits.get(metric.key), switches)
            if extra:
                with columns[len(shown) % 2]:
                    _seconds(table)
            if any(m.key == "rollout/policy_lag_max" for m in shown):
                with columns[len(shown) % 2]:
                    st.markdown("**Policy lag, how often**")
                    _chart(charts.lag_chart(table), "Histogram of policy lag")
                    st.caption("Most updates should sit at the left; a long tail means a queue.")
        distinct = reader.distinct_share()
        if distinct is not None:
            st.markdown(f"**Different texts among the last 200 answers: {distinct:.0%}**")
            st.caption(
                "Equal answers to different questions: a share that falls is a policy that "
                "collapses."
            )
        _csv(table.reset_index(), "metrics")
    else:
        st.info("No update has been made yet.", icon=":material/hourglass_empty:")
    st.markdown("## What became of the answers")
    st.caption(
        "A reward of 0 is a judged answer; unscored means that the judge failed; excluded and "
        "stale are answers that must not be learned from, with the reason."
    )
    st.dataframe(
        states,
        hide_index=True,
        column_config={"rollouts": st.column_config.NumberColumn(format="localized")},
    )
    _csv(states, "states")


def rollouts_page(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = _zone()
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
            "time": _local(table["created_at"], zone),
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
        _csv(table, "rollouts")
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
        st.warning(str(error))


def versions_page(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = _zone()
    table = reader.versions()
    if not len(table):
        st.info("There is no weight version yet.", icon=":material/hourglass_empty:")
        return
    st.markdown("## What happened")
    events = reader.events()
    if events:
        happened = pd.DataFrame(
            {
                "time": _local(pd.Series([e.created_at for e in events]), zone),
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
        _csv(happened, "events")
    else:
        st.caption("No switch, pause, rollback or warning yet.")
    st.markdown("## Weight versions")
    st.caption(
        f"The newest {len(table)}. One with a checkpoint can be rolled back to (Controls); one "
        "that is abandoned lies on a line that a rollback left."
    )
    shown = table.assign(
        created_at=_local(table["created_at"], zone),
        published_at=_local(table["published_at"], zone),
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
    _csv(table, "versions")
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
        _csv(compared, "comparison")
    _side_by_side(reader, int(one), int(two))


def controls_page(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = _zone()
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
        (st.success if done[0] else st.error)(done[1])
    _confirmation(client)
    try:
        learning = client.learning()
    except ControlError as error:
        st.warning(str(error), icon=":material/cloud_off:")
        learning = None
    if learning is not None:
        paused = learning.get("paused")
        why = f" ({learning['pause_reason']})" if paused and learning.get("pause_reason") else ""
        st.markdown(
            f"**Now:** learning is {'paused' + why if paused else 'on'}, version "
            f"{_number(learning.get('serving_version'), ',d')} serves."
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
    parts = [f"{one.version:,}, made {clock(one.created_at, zone)}"]
    if phase is not None and one.created_at < phase.started_at:
        parts.append(f"before {style_name(phase.style)} was preferred")
    if one.pinned:
        parts.append("pinned")
    return ", ".join(parts)


def runs_page(options: argparse.Namespace) -> None:
    zone = _zone()
    place = Path(options.runs)
    found, refused = find_runs(place)
    for sentence in refused:
        st.warning(sentence, icon=":material/folder_off:")
    if not found:
        st.info(
            f"There are no results in {place.absolute()}. A simulation leaves them there: "
            "online-sao train --scenario scenarios/preference_shift.toml --out "
            f"{place}/shift (another folder: --runs).",
            icon=":material/science:",
        )
        return
    scenarios = sorted({run.scenario for run in found})
    scenario = st.selectbox("Scenario", scenarios, key="scenario")
    found = [run for run in found if run.scenario == scenario]
    st.caption(str(found[0].data.get("claim", "")))
    presets = list(dict.fromkeys(run.preset for run in found))
    seeds = sorted({run.seed for run in found})
    left, right = st.columns(2)
    with left:
        wanted = st.multiselect("Presets", presets, default=presets, key="presets")
    with right:
        drawn = st.multiselect("Seeds", seeds, default=seeds, key="seeds")
    chosen = [run for run in found if run.preset in wanted and run.seed in drawn]
    if not chosen:
        st.info("No run has such a preset and seed.", icon=":material/filter_alt:")
        return
    st.markdown("## Results")
    table = runs_table(chosen)
    shown = table.drop(columns="scenario").assign(written=_local(table["written"], zone))
    st.dataframe(
        shown,
        hide_index=True,
        placeholder=NOTHING,
        column_config={
            "written": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
            "mean reward": st.column_config.NumberColumn(format="%.2f"),
            "masked": st.column_config.NumberColumn(format="%.3f"),
            "minutes": st.column_config.NumberColumn(format="%.1f"),
            **{
                name: st.column_config.NumberColumn(format="%.2f")
                for name in shown
                if name.endswith((": last mean", ": held-out share"))
            },
        },
    )
    mark, window = chosen[0].data.get("mark", 0.8), int(chosen[0].data.get("window", 40))
    st.caption(
        f"Last mean: reward of a phase's last {window} rollouts. Rollouts to {mark:g}: until "
        f"{window} in a row had that mean reward; {NOTHING} means never. Held-out share: answers "
        "to questions never trained on that were in the preferred style, at the end of the phase."
    )
    _csv(table, "runs")
    try:
        results = [_results(str(run.folder), run.changed) for run in chosen]
        same_phases(results)
    except ScenarioError as error:
        st.warning(str(error), icon=":material/folder_off:")
        return
    _run_charts(results, window)


def _run_charts(results: list[Results], window: int) -> None:
    phases, styles = phases_of(results[0]), styles_of(results)
    last = sum(phase.rollouts for phase in results[0].scenario.phases)
    rewards = rolling_rewards(results, window)
    if not len(rewards):
        st.info("No answer of these runs has a reward yet.", icon=":material/hourglass_empty:")
        return
    st.markdown("## Reward")
    _chart(
        charts.runs_chart(rewards, phases, last, styles, window), "Mean reward of the chosen runs"
    )
    st.caption(
        "A thin line is one run, a thick one the mean of a preset's seeds. Shaded in the preferred "
        "style's colour; a dashed line is a switch."
    )
    for preset in dict.fromkeys(run.preset for run in results):
        mine = [run for run in results if run.preset == preset]
        shares = style_shares(mine)
        if len(shares):
            seeds = ", ".join(str(run.seed) for run in mine)
            which = f"seed {seeds}" if len(mine) == 1 else f"seeds {seeds} together"
            st.markdown(f"## What {preset} writes")
            _chart(
                charts.shares_chart(shares, phases, 1, last, styles),
                f"Stacked shares of writing styles under {preset}",
            )
            st.caption(f"Styles the judge saw, {which}.")


@st.cache_data(max_entries=200, show_spinner=False)
def _results(folder: str, changed: float) -> Results:
    """`changed` makes a result that was written anew another one."""
    return read_results(folder)


PAGES: dict[str, tuple[Callable[[StoreReader, argparse.Namespace], None], bool]] = {
    "Live": (live_page, True),
    "Learning health": (health_page, True),
    "Rollouts": (rollouts_page, False),  # a table that changes under the hand cannot be read
    "Versions": (versions_page, False),
    "Controls": (controls_page, False),
}
RUNS = "Runs"  # reads result folders instead of the store


# ---- controls: ask, act, say what happened


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
        st.markdown(f"**{question}**")
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
    at = clock(datetime.now(UTC), _zone())
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


# ---- parts of pages


def _rollout(reader: StoreReader, options: argparse.Namespace, seq: int, zone: tzinfo) -> None:
    rollout = reader.rollout(seq)
    reason = f": {rollout.reason}" if rollout.reason else ""
    st.markdown(f"## Rollout {seq:,} ({rollout.state}{reason})")
    left, right = st.columns(2)
    with left:
        for message in rollout.messages or []:
            content = message.get("content")
            with st.container(border=True):
                st.caption(str(message.get("role")))
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
                else f" (from {verdict.source})"
            )
            st.markdown(f"**Reward {verdict.reward:g}**{marks}")
            if verdict.rationale:
                st.text(verdict.rationale)
        st.caption("  \n".join(_facts(rollout, zone)))
        given = reader.feedback(seq)
        if len(given):
            st.dataframe(given.assign(at=_local(given["at"], zone)), hide_index=True)
            _csv(given, "feedback")
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
        f"judge: {verdict.model}, {_number(verdict.latency_s, '.2f')} s"
        if verdict and verdict.model
        else "",
        f"written by version {spans}",
        f"learned from in version {rollout.trained_version}"
        if rollout.trained_version is not None
        else "",
        f"temperature {rollout.temperature:g}, ended by {rollout.finish_reason}, "
        f"{_number(rollout.latency_s, '.2f')} s",
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
        st.caption("No tokenizer.json was found (give --tokenizer), so tokens show as numbers.")
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
    _chart(charts.tokens_chart(table, field, middle), f"{shade} of each token")
    with st.expander("Numbers of every token"):
        st.dataframe(table, hide_index=True)
        _csv(table, f"tokens_{rollout.seq}")


def _masked(rollout: Rollout, settings: dict[str, Any]) -> np.ndarray:
    """Tokens that the policy loss left out, as far as the run's settings tell."""
    ratios = rollout.importance_ratios
    low, high = settings.get("eps_low"), settings.get("eps_high")
    if ratios is None or settings.get("objective", "dis") != "dis" or low is None or high is None:
        return np.zeros(len(rollout.token_ids), bool)
    return (ratios <= 1 - low) | (ratios >= 1 + high)


def _metric(table: pd.DataFrame, metric: Metric, bound: Bound | None, switches: list[int]) -> None:
    values = table[metric.key].dropna()
    unit = f" {metric.unit}" if metric.unit else ""
    mean = float(values.iloc[-RECENT_UPDATES:].mean())
    beyond = "" if bound is None or bound.holds(mean) else " :material/warning: beyond its bound"
    st.markdown(f"**{metric.title}**: {mean:.3g}{unit}{beyond}")
    _chart(charts.metric_chart(table, metric, bound, switches), f"{metric.title} over versions")
    reading = metric.reading
    if bound is not None:
        reading += f" Well is {bound} ({_source(bound)})."
        if beyond:
            reading += f" {bound.advice}"
    st.caption(reading)


def _source(bound: Bound) -> str:
    return "the dashboard's bound" if bound.source == OURS else f"{bound.source} of this run"


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
        st.markdown(f"**{_escape(row.question)}**")
        left, right = st.columns(2)
        with left:
            _answer(row.rollout_one, row.version_one, row.style_one, row.reward_one, row.answer_one)
        with right:
            _answer(row.rollout_two, row.version_two, row.style_two, row.reward_two, row.answer_two)
    _csv(same.answers, "answers")


def _answer(rollout: int, version: int, style: Any, reward: Any, answer: str) -> None:
    with st.container(border=True):
        st.text(answer or "(deleted)")
        seen = style_name(style) if isinstance(style, str) else "not judged"
        st.caption(
            f"version {version:,}, rollout {rollout:,}; style seen: {seen}, reward "
            f"{_number(reward, '.2f')}"
        )


def _escape(text: str) -> str:
    """As one line of markdown that means only itself."""
    flat = " ".join(text.split())[:200]
    return "".join(f"\\{char}" if char in "\\`*_[]{}()#+-.!|<>~$:" else char for char in flat)


def _is_it_healthy(now: Situation) -> None:
    """What the word on learning rests on, and what to do when it is not well."""
    found = checks(now)
    well = sum(check.well for check in found)
    title = f"Is learning healthy? {well} of {len(found)} figures inside their bounds"
    if not found:
        title = (
            f"Is learning healthy? Too early to say: {now.num_updates} of the {FEWEST_UPDATES} "
            "updates that it takes"
        )
    with st.expander(title, icon=":material/monitor_heart:", expanded=well < len(found)):
        if found:
            table = pd.DataFrame(
                {
                    "figure": [check.title for check in found],
                    f"mean of {now.num_updates} updates": [
                        f"{check.mean:.3g} {check.unit}".strip() for check in found
                    ],
                    "well is": [str(check.bound) for check in found],
                    "now": ["well" if check.well else "beyond" for check in found],
                }
            )
            st.dataframe(table, hide_index=True)
            _csv(table, "checks")
    st.caption(
        "If it is not: pause stops learning and goes on serving; roll back serves an earlier "
        "checkpoint; switching back undoes a switch. All three are under Controls. Learning health "
        "shows since when a figure is off, Rollouts the answers behind it."
    )


def _seconds(table: pd.DataFrame) -> None:
    chart = charts.seconds_chart(table)
    if chart is not None:
        st.markdown("**Where the seconds go**")
        _chart(chart, "Seconds per part of an update")
        st.caption("Seconds per part of an update, mean over 20.")


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


def _range(what: str, key: str) -> int | None:
    chosen = st.segmented_control(
        f"Range ({what})",
        list(RANGES),
        default="last 1,000",
        required=True,
        key=key,
        label_visibility="collapsed",
    )
    return RANGES[chosen or "last 1,000"]


def _tile(label: str, value: str, help: str | None = None) -> None:
    st.metric(label, value, help=help, width="content", border=True)


def _chart(chart: Any, alt: str) -> None:
    st.altair_chart(chart, width="stretch", alt=alt)


def _csv(table: pd.DataFrame, name: str) -> None:
    st.download_button(
        "CSV",
        table.to_csv(index=False).encode(),
        file_name=f"online_sao_{name}.csv",
        mime="text/csv",
        key=f"csv_{name}",
        icon=":material/download:",
        on_click="ignore",
        help="Download this table.",
    )


def _details(data: dict[str, Any]) -> str:
    parts = []
    for key, value in data.items():
        if value is None:
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        parts.append(f"{key}: {shown}")
    return "; ".join(parts)


def _number(value: float | int | None, form: str) -> str:
    return "none yet" if value is None or value != value else format(value, form)


def _zone() -> tzinfo:
    """The viewer's time zone, as the browser says."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (KeyError, ValueError, OSError):
        return UTC


def _local(times: pd.Series, zone: tzinfo) -> pd.Series:
    """Times as the viewer's clock shows them, without a zone (streamlit would convert again)."""
    return pd.to_datetime(times, utc=True).dt.tz_convert(zone).dt.tz_localize(None)


if __name__ == "__main__":
    main()
