"""What is going on now, in one sentence, a row of tiles and three charts."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

import pandas as pd
import streamlit as st

from dashboard import charts
from dashboard.control import ServiceClient
from dashboard.headline import (
    advice,
    ago,
    checked,
    checks,
    clock,
    headline,
    learning_word,
    sample,
    style_name,
    tone,
    troubles,
)
from dashboard.parts import (
    choose_range,
    csv_button,
    draw,
    escape,
    shown_number,
    tile,
    viewer_zone,
)
from dashboard.queries import RECENT, Situation, StoreReader

WHAT_TO_DO = """
**What to do**

- *The reward stays low and all figures are well:* a switch usually takes some dozens of answers.
  Read under [Rollouts](?page=Rollouts) what it writes and what the judge said.
- *A figure is beyond its bound:* [Learning health](?page=Learning+health) shows since when. Pause
  learning under [Controls](?page=Controls): it goes on serving. Then roll back to a version from
  before.
- *The answers have become bad:* roll back under [Controls](?page=Controls): an earlier checkpoint
  serves.
- *The switch was a mistake:* switch back under [Controls](?page=Controls).
- *The judge fails:* the reasons stand under [Learning health](?page=Learning+health).
- *Answers wait and no update is made, or the service is down:* see its log, and start it again
  (make serve): nothing is lost.
"""


def show(reader: StoreReader, options: argparse.Namespace) -> None:
    zone = viewer_zone()
    now = reader.situation()
    client = ServiceClient(options.url)
    # Of an endpoint that cannot be asked it is not known whether it answers.
    answers = None if client.fault else client.answers()
    hints = [client.fault] if client.fault else []
    hints += advice(now, service_answers=answers)
    box = {"success": st.success, "info": st.info, "warning": st.warning}[tone(now, hints)]
    said = [f"**{escape(headline(now, zone))}**", *map(escape, hints)]
    box("  \n".join(said), icon=":material/campaign:")
    _tiles(now, options.url, answers)
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
        "Shares of writing styles in groups of answers, with the preferred style above",
    )
    part = f" ({series.sampled:,} of each looked at)" if series.sampled else ""
    st.caption(
        f"Styles the judge saw, in groups of {series.width:,} answers{part}; a group ends at a "
        "switch (dashed line), and the newest may not be full yet. The strip on top is the style "
        "that was preferred: its colour should fill up."
    )
    left, right = st.columns(2)
    with left:
        st.markdown("## How well it does")
        draw(charts.reward_chart(series, *which), "Mean reward, quality and style match")
        how = (
            "Means over the last 20 answers, so that a switch shows over the 20 after it; each "
            "dot is one answer"
            if len(series.points)
            else f"Means over groups of {series.width:,} answers"
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
                "a switch and should meet again within a few dozen answers."
            )
        else:
            st.caption("No values yet: nothing was learned in this range, or without a critic.")


def _tiles(now: Situation, url: str, answers: bool | None) -> None:
    """What matters most first: a phone shows two in a row."""
    phase = now.phase
    with st.grid(5, min_column_width=150):
        tile(
            f"Preferred since {clock(phase.started_at, viewer_zone())}" if phase else "Preferred",
            escape(style_name(phase.style)) if phase else "none",
            note=ago(phase.started_at, datetime.now(UTC)) if phase else None,
        )
        tile(
            f"Reward, {sample(min(now.num_scored, RECENT), now)}",
            shown_number(now.reward_now, ".2f"),
            "Mean reward (0 to 1) of the newest judged answers since the switch: quality times "
            "style match.",
        )
        tile(
            f"Quality, {sample(now.num_graded, now)}",
            shown_number(now.quality_share, ".0%"),
            "Share of them with quality 1. If it is low it is the quality that holds the reward "
            "down, whatever the style.",
        )
        tile(
            f"In style, {sample(now.num_styled, now)}",
            shown_number(now.preferred_share, ".0%"),
            "Share of them that the judge saw in the preferred style.",
        )
        tile(
            "Learning machinery",
            learning_word(now, service_answers=answers),
            "Whether learning runs as it should, not whether the answers are good. Healthy: "
            "updates are made, the judge answers, and each figure in the line below that can be "
            "measured lies inside its bound.",
        )
        tile("Service", {True: "up", False: "down", None: "unknown"}[answers], escape(url))
        tile(
            "Waiting",
            f"{now.waiting_for_judge} + {now.waiting_for_learner}",
            "Answers that wait for the judge + answers that wait for the learner.",
        )
        tile("Version", shown_number(now.version, ",d"), "The newest weights: one more per update.")
        tile(
            "Updates / min",
            shown_number(now.updates_per_minute or 0, ".0f"),
            "Over the last two dozen updates; each learns from one answer.",
        )
        tile(
            "Delay",
            shown_number(now.policy_lag, ".0f"),
            "Policy lag: how many versions newer the weights were that learned from the newest "
            "answer than those that wrote it. A few are well; too old an answer teaches nothing.",
        )


def _is_it_healthy(now: Situation) -> None:
    """What the word on the machinery rests on, and what to do when something is not well."""
    found = checks(now)
    with st.expander(
        f"Learning machinery: {checked(now)} (open: each figure, and what to do)",
        expanded=bool(troubles(now)),
    ):
        table = pd.DataFrame(
            {
                "figure": [check.title for check in found],
                f"mean of {now.num_updates} updates": [
                    "none yet" if check.mean is None else f"{check.mean:.3g} {check.unit}".strip()
                    for check in found
                ],
                "well is": [str(check.bound) for check in found],
                "now": [check.why_not or ("well" if check.well else "beyond") for check in found],
            }
        )
        st.dataframe(table, hide_index=True)
        csv_button(table, "checks")
        st.markdown(WHAT_TO_DO)
