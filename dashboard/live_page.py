"""What is going on now, in one sentence, a row of tiles and three charts."""

from __future__ import annotations

import argparse

import pandas as pd
import streamlit as st

from dashboard import charts
from dashboard.control import ServiceClient
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
from dashboard.parts import choose_range, csv_button, draw, shown_number, tile, viewer_zone
from dashboard.queries import Situation, StoreReader


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = viewer_zone()
    now = reader.situation()
    answers = ServiceClient(options.url).answers()
    sentence = headline(now, zone)
    hints = advice(now, service_answers=answers)
    box = st.warning if hints else st.success if now.num_scored else st.info
    box("  \n".join([f"**{sentence}**", *hints]), icon=":material/campaign:")
    phase = now.phase
    with st.container(horizontal=True):
        since = f" since {clock(phase.started_at, zone)}" if phase else ""
        tile(f"Preferred{since}", style_name(phase.style) if phase else "none")
        tile(
            f"Reward, last {RECENT}",
            shown_number(now.reward_now, ".2f"),
            "Mean reward (0 to 1) of the newest judged answers since the switch.",
        )
        tile(
            "In that style",
            shown_number(now.preferred_share, ".0%"),
            f"Share of the last {RECENT} judged answers that the judge saw in that style.",
        )
        tile(
            "Learning",
            learning_word(now, service_answers=answers),
            "Healthy: updates are made, the judge answers, and each figure under 'Is learning "
            "healthy?' lies inside its bound.",
        )
        tile("Version", shown_number(now.version, ",d"), "The newest weights: one more per update.")
        tile(
            "Updates / min",
            shown_number(now.updates_per_minute or 0, ".0f"),
            "Over the last two dozen updates; each learns from one answer.",
        )
        tile(
            "Waiting",
            f"{now.waiting_for_judge} + {now.waiting_for_learner}",
            "Answers that wait for the judge + answers that wait for the learner.",
        )
        tile("Service", "up" if answers else "down", options.url)
    if not now.num_rollouts:
        return
    _is_it_healthy(now)
    span = choose_range("rollouts", key="live_range")
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
    draw(
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
        draw(charts.reward_chart(series, *which), "Mean reward, quality and style match")
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
            draw(charts.value_chart(series, *which), "Expected against earned reward")
            st.caption(
                "The critic's expectation before an answer, against what was earned. They part at "
                "a switch and should meet again within a few dozen rollouts."
            )
        else:
            st.caption("No values yet: nothing was learned in this range, or without a critic.")


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
            csv_button(table, "checks")
    st.caption(
        "If it is not: pause stops learning and goes on serving; roll back serves an earlier "
        "checkpoint; switching back undoes a switch. All three are under Controls. Learning health "
        "shows since when a figure is off, Rollouts the answers behind it."
    )
