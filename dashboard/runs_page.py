"""Results of simulations: a row per run, presets and seeds over one another."""

from __future__ import annotations

import argparse
from pathlib import Path

import streamlit as st

from dashboard import charts
from dashboard.parts import NOTHING, csv_button, draw, escape, local_times, viewer_zone
from dashboard.runs import (
    Summary,
    Unlike,
    find_runs,
    phases_of,
    rolling_rewards,
    runs_table,
    same_phases,
    style_shares,
    styles_of,
    unlike,
)
from online_sao.errors import ScenarioError
from online_sao.scenario import Results, read_results


def show(options: argparse.Namespace) -> None:
    zone = viewer_zone()
    place = Path(options.runs)
    found, refused = find_runs(place)
    for sentence in refused:
        st.warning(escape(sentence), icon=":material/folder_off:")
    if not found:
        st.info(
            f"There are no results in {escape(place.absolute())}. A simulation leaves them there: "
            "online-sao train --scenario scenarios/preference_shift.toml --out "
            f"{escape(place)}/shift (another folder: --runs).",
            icon=":material/science:",
        )
        return
    scenarios = sorted({run.scenario for run in found})
    scenario = st.selectbox("Scenario", scenarios, key="scenario")
    found = [run for run in found if run.scenario == scenario]
    found = _chosen_folders(found)
    if not found:
        st.info("No folder is chosen.", icon=":material/filter_alt:")
        return
    st.caption(escape(found[0].data.get("claim", "")))
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
    shown = table.drop(columns="scenario").assign(written=local_times(table["written"], zone))
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
        f"{window} in a row had that mean reward (-: fewer were rewarded). Held-out share: answers "
        "to questions never trained on that were in the preferred style, at the end of the phase."
    )
    csv_button(table, "runs")
    try:
        results = [_results(str(run.folder), run.changed) for run in chosen]
        same_phases(results)
    except ScenarioError as error:
        st.warning(escape(error), icon=":material/folder_off:")
        return
    _run_charts(results, window, unlike(chosen))


def _chosen_folders(found: list[Summary]) -> list[Summary]:
    """Runs in the folders that the viewer chooses; at first all, if they belong together."""
    folders = sorted({run.group for run in found})
    if len(folders) == 1:
        return found
    newest = max(found, key=lambda run: run.changed).group
    apart = bool(unlike(found))
    chosen = st.multiselect(
        "Folders", folders, default=[newest] if apart else folders, key="folders"
    )
    if apart:
        st.caption(
            "Not all of these folders hold runs that belong together, so at first only the newest "
            "is shown."
        )
    return [run for run in found if run.group in chosen]


def _run_charts(results: list[Results], window: int, differing: Unlike) -> None:
    phases, styles = phases_of(results[0]), styles_of(results)
    last = sum(phase.rollouts for phase in results[0].scenario.phases)
    rewards = rolling_rewards(results, window)
    if not len(rewards):
        st.info("No answer of these runs has a reward yet.", icon=":material/hourglass_empty:")
        return
    for preset, why in differing.presets.items():
        st.warning(
            f"The runs of {escape(preset)} are not averaged: {escape(why)}. Choose folders or "
            "seeds whose runs belong together.",
            icon=":material/call_split:",
        )
    if differing.between:
        st.warning(
            f"The presets are not to be set against each other: {escape(differing.between)}. "
            "Choose runs that were made alike.",
            icon=":material/call_split:",
        )
    st.markdown("## Reward")
    draw(
        charts.runs_chart(rewards, phases, last, styles, window, differing.presets),
        "Mean reward of the chosen runs",
    )
    st.caption(
        "A thin line is one run, a thick one the mean of a preset's runs. Shaded in the preferred "
        "style's colour; a dashed line is a switch."
    )
    for preset in dict.fromkeys(run.preset for run in results):
        mine = [run for run in results if run.preset == preset]
        if preset in differing.presets:
            continue  # shares over all of them would be a mean too
        shares = style_shares(mine)
        if len(shares):
            seeds = ", ".join(str(run.seed) for run in mine)
            which = f"seed {seeds}" if len(mine) == 1 else f"seeds {seeds} together"
            st.markdown(f"## What {escape(preset)} writes")
            draw(
                charts.shares_chart(shares, phases, 1, last, styles),
                f"Stacked shares of writing styles under {preset}",
            )
            st.caption(f"Styles the judge saw, {which}.")


@st.cache_data(max_entries=200, show_spinner=False)
def _results(folder: str, changed: float) -> Results:
    """`changed` makes a result that was written anew another one."""
    return read_results(folder)
