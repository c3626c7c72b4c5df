"""One plain sentence on what is happening, and what to do if it is not well. No streamlit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from dashboard.metrics import METRICS, Bound, bounds
from dashboard.queries import COUNTED, RECENT, Situation

SETTLED = 0.8  # mean reward over the last RECENT rollouts from which a preference is learned
STUCK_ROLLOUTS = 150  # after so many, a reward still under STUCK needs a decision
STUCK = 0.3
JUDGE_FAILING = 0.2  # share of unscored answers worth a word
IDLE_S = 300  # seconds without an answer worth a word
FEWEST_UPDATES = 8  # before so many, health cannot be told from noise
STALLED_S = 120  # seconds without an update while answers wait


def headline(now: Situation, zone: tzinfo) -> str:
    """What the endpoint is doing, for someone who has just opened the page."""
    phase = now.phase
    if now.num_rollouts == 0:
        wanted = f" {style_name(phase.style)} is preferred." if phase else ""
        return f"No answer has been recorded yet.{wanted} Send a first request to the endpoint."
    if now.paused_since is not None:
        why = f" ({now.pause_reason})" if now.pause_reason else ""
        return (
            f"Learning is paused since {clock(now.paused_since, zone)}{why}: version "
            f"{now.version} goes on answering and nothing is learned."
        )
    if phase is None:
        return f"{now.num_rollouts:,} answers are recorded, but no style is preferred yet."
    name, since = style_name(phase.style), clock(phase.started_at, zone)
    if not now.num_scored or now.reward_now is None or now.reward_at_switch is None:
        return f"{name} is preferred since {since}; no answer has been judged since then."
    scored = f"{'over ' if now.num_scored >= COUNTED else ''}{now.num_scored:,}"
    if now.num_scored >= RECENT and now.reward_now >= SETTLED:
        text = (
            f"Settled on {name} since {since}: reward {now.reward_now:.2f} over the last "
            f"{RECENT} answers ({scored} under this preference)"
        )
    else:
        text = (
            f"Adapting to {name} since {since}: reward {now.reward_at_switch:.2f} → "
            f"{now.reward_now:.2f} in {scored} rollouts"
        )
    if now.policy_lag is not None:
        text += f"; policy lag {now.policy_lag:.0f}"
    if now.warnings:
        count = len(now.warnings)
        text += f"; {count} warning{'s' if count > 1 else ''} since the switch."
    else:
        text += "; guard rails quiet."
    return text


@dataclass(frozen=True)
class Check:
    """A metric of the newest updates against its bound."""

    title: str
    mean: float
    unit: str
    bound: Bound

    @property
    def well(self) -> bool:
        return self.bound.holds(self.mean)


def checks(now: Situation) -> list[Check]:
    """Every metric that has a bound and was measured; empty before FEWEST_UPDATES updates."""
    if now.num_updates < FEWEST_UPDATES:
        return []
    return [
        Check(METRICS[key].title, now.recent[key], METRICS[key].unit, bound)
        for key, bound in bounds(now.config).items()
        if key in now.recent
    ]


def learning_word(
    now: Situation, *, service_answers: bool | None, at: datetime | None = None
) -> str:
    """Whether learning is healthy, in a word or three."""
    if service_answers is False:
        return "stopped"
    if now.paused_since is not None:
        return "paused"
    if troubles(now, at=at):
        return "needs a look"
    if now.num_updates < FEWEST_UPDATES:
        return "too early to say" if now.num_updates else "not begun"
    return "healthy"


def troubles(now: Situation, *, at: datetime | None = None) -> list[str]:
    """What is wrong with the learning, each with what to do."""
    at = at or datetime.now(UTC)
    found = []
    if now.unscored_share > JUDGE_FAILING:
        found.append(
            f"The judge failed on {now.unscored_share:.0%} of the last answers; they are not "
            "learned from. The reasons stand under Learning health: check the judge."
        )
    stuck = (
        now.paused_since is None
        and now.num_scored >= STUCK_ROLLOUTS
        and now.reward_now is not None
        and now.reward_now < STUCK
    )
    if stuck:
        found.append(
            f"After {now.num_scored:,} rollouts the reward is still low. Look at Learning "
            "health: if entropy is near 0 or the KL to the start is high, roll back under "
            "Controls; else give it time."
        )
    waiting = now.waiting_for_learner
    if waiting and now.updates_per_minute is None and now.paused_since is None:
        last = now.last_answer_at
        if last is not None and (at - last).total_seconds() > STALLED_S:
            found.append(
                f"{waiting} answers wait for the learner, but no update was made for "
                f"{STALLED_S // 60} minutes. See the service's log, or restart it: nothing is lost."
            )
    found += [
        f"{check.title} is {check.mean:.3g}{' ' + check.unit if check.unit else ''} "
        f"({check.bound} is well). {check.bound.advice}"
        for check in checks(now)
        if not check.well
    ]
    if now.warnings:
        newest = now.warnings[0]
        said = newest.data.get("what") or newest.data.get("reason") or newest.kind
        found.append(f"Last warning: {said}")
    return found


def advice(
    now: Situation, *, service_answers: bool | None, at: datetime | None = None
) -> list[str]:
    """What an operator should know beyond the headline, each with what to do. Often empty."""
    at = at or datetime.now(UTC)
    found = []
    if service_answers is False:
        found.append(
            "The service does not answer, so nobody is served: figures below are what it left in "
            "the store. Start it again (make serve): it goes on where it stopped."
        )
    found += troubles(now, at=at)
    if now.paused_since is not None:
        found.append("Resume it under Controls when the cause is gone.")
    idle = (at - now.last_answer_at).total_seconds() if now.last_answer_at else 0.0
    if idle > IDLE_S:
        found.append(f"The last answer was recorded {duration(idle)} ago.")
    return found


def style_name(style: str) -> str:
    if style == "none":  # how the judge says that it saw none of the pool
        return "No style"
    return style[:1].upper() + style[1:].replace("_", " ")


def clock(at: datetime, zone: tzinfo) -> str:
    """The time of day, with the date if it is not today's."""
    local = at.astimezone(zone)
    today = datetime.now(zone).date()
    return local.strftime("%H:%M" if local.date() == today else "%d %b %H:%M")


def duration(seconds: float) -> str:
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return f"{seconds:.0f} s"
