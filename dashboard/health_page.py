"""Every metric of the updates, how to read it, and its bound."""

from __future__ import annotations

import argparse

import pandas as pd
import streamlit as st

from dashboard import charts
from dashboard.metrics import ABANDONED, GROUPS, OURS, RECENT_UPDATES, Bound, Metric, bounds
from dashboard.parts import choose_range, csv_button, draw, open_reader
from dashboard.queries import StoreReader


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    span = choose_range("updates", key="health_range")
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
                    st.markdown("**Delay (policy lag), how often**")
                    draw(charts.lag_chart(table), "Histogram of the delay (policy lag)")
                    st.caption("Most updates should sit at the left; a long tail means a queue.")
        _probes(reader, switches)
        distinct = reader.distinct_share()
        if distinct is not None:
            st.markdown(f"**Different texts among the last 200 answers: {distinct:.0%}**")
            st.caption(
                "Equal answers to different questions: a share that falls is a policy that "
                "collapses."
            )
        csv_button(table.reset_index(), "metrics")
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
    csv_button(states, "states")


@st.cache_data(ttl=10, show_spinner=False)  # counts every rollout
def _states(url: str) -> pd.DataFrame:
    return open_reader(url).states()


def _metric(table: pd.DataFrame, metric: Metric, bound: Bound | None, switches: list[int]) -> None:
    values = table.loc[~table[ABANDONED], metric.key].dropna()
    unit = f" {metric.unit}" if metric.unit else ""
    mean = float(values.iloc[-RECENT_UPDATES:].mean()) if len(values) else None
    is_well = bound is None or mean is None or bound.holds(mean)
    beyond = "" if is_well else " :material/warning: beyond its bound"
    shown = "too early to say" if mean is None else f"{mean:.3g}{unit}"
    st.markdown(f"**{metric.title}**: {shown}{beyond}")
    draw(charts.metric_chart(table, metric, bound, switches), f"{metric.title} over versions")
    reading = metric.reading
    if bound is not None:
        reading += f" Well is {bound} ({_source(bound)})."
        if beyond:
            reading += f" {bound.advice}"
    st.caption(reading)


def _source(bound: Bound) -> str:
    return "the dashboard's bound" if bound.source == OURS else f"{bound.source} of this run"


def _probes(reader: StoreReader, switches: list[int]) -> None:
    """Held-out rounds, where the service asks them."""
    probes = reader.probes()
    if not len(probes.dropna(subset=["quality"])):
        return
    st.markdown("## Does it hold on questions it never learns from?")
    draw(charts.probes_chart(probes, switches), "Held-out quality and reward over versions")
    st.caption(
        f"Means over the answers of each round ({int(probes['answers'].iloc[-1])} in the newest). "
        "Quality that falls here while the reward of what is learned from rises means that the "
        "judge is being gamed: pause, and read the answers."
    )
    csv_button(probes, "probes")


def _seconds(table: pd.DataFrame) -> None:
    chart = charts.seconds_chart(table)
    if chart is not None:
        st.markdown("**Where the seconds go**")
        draw(chart, "Seconds per part of an update")
        st.caption("Seconds per part of an update, mean over 20.")
