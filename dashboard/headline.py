"""One plain sentence on what is happening, and what to do if it is not well. No streamlit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Literal

from dashboard.metrics import METRICS, RECENT_UPDATES, Bound, bounds
from dashboard.queries import COUNTED, FIRST, RECENT, SETTLED, Situation

STUCK_ROLLOUTS = 150  # after so many, a reward still under STUCK needs a decision
STUCK = 0.3
RISEN = 0.1  # what the mean reward must have gained since the switch to be called rising
NO_REWARD = 0.05  # a mean reward below it is none to speak of
JUDGE_FAILING = 0.2  # share of unscored answers worth a word
IDLE_S = 300  # seconds without an answer worth a word
FEWEST_UPDATES = RECENT_UPDATES  # before so many, on the line that serves, there is no verdict
STALLED_S = 120  # seconds without an update while answers wait


Progress = Literal["unknown", "early", "flat", "rising", "settled", "stuck"]


def progress(now: Situation) -> Progress:
    """Whether the answers get better, however well the learning runs."""
    if not now.num_scored or now.reward_now is None or now.reward_at_switch is None:
        return "unknown"
    if now.num_scored >= RECENT and now.reward_now >= SETTLED:
        return "settled"
    if now.num_scored >= STUCK_ROLLOUTS and now.reward_now < STUCK:
        return "stuck"
    if now.num_scored <= FIRST:  # at the switch and now are the same answers
        return "early"
    return "rising" if now.reward_now - now.reward_at_switch >= RISEN else "flat"


def tone(now: Situation, hints: list[str]) -> Literal["success", "info", "warning"]:
    """The colour of the headline: good news only where the answers are good or get better."""
    if hints:
        return "warning"
    return "success" if progress(now) in ("settled", "rising") else "info"


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
    if progress(now) == "settled":
        after = f" after {now.settled_after:,} answers" if now.settled_after else ""
        text = (
            f"Settled on {name}{after}: reward {now.reward_now:.2f} over the last {RECENT} of "
            f"{_answers(now)} since {since}"
        )
    else:
        text = f"Adapting to {name} since {since}: {_reward(now, now.reward_at_switch)}"
    count = len(now.warnings)
    return f"{text}; {count or 'no'} warning{'s' if count > 1 else ''} since the switch."


def _answers(now: Situation) -> str:
    over = "over " if now.num_scored >= COUNTED else ""
    return f"{over}{now.num_scored:,} answer{'s' if now.num_scored != 1 else ''}"


def _reward(now: Situation, at_switch: float) -> str:
    """What became of the reward since the switch, while it has not settled."""
    reward, how = now.reward_now or 0.0, progress(now)
    if reward < NO_REWARD and at_switch < NO_REWARD:
        if not reward and now.num_scored <= RECENT:
            text = f"no reward yet in {_answers(now)}"
        else:
            last = f"the last {RECENT} of " if now.num_scored > RECENT else ""
            text = f"hardly any reward ({reward:.2f}) in {last}{_answers(now)}"
        return text if how == "stuck" else f"{text}; a switch usually takes some dozens"
    if how == "early":
        return f"reward {reward:.2f} in {_answers(now)}, too few to see where it goes"
    text = f"reward {at_switch:.2f} → {reward:.2f} in {_answers(now)}"
    return f"{text}, no clear rise yet" if how == "flat" else text


@dataclass(frozen=True)
class Check:
    """A metric of the newest updates against its bound."""

    title: str
    mean: float | None  # over the newest updates; None if none of them measured it
    unit: str
    bound: Bound
    why_not: str = ""  # why there is no verdict on it

    @property
    def well(self) -> bool | None:
        """None: no verdict."""
        return None if self.why_not or self.mean is None else self.bound.holds(self.mean)


def checks(now: Situation) -> list[Check]:
    """Every metric that has a bound. Before FEWEST_UPDATES updates there is no verdict on any."""
    found = []
    for key, bound in bounds(now.config).items():
        metric, mean = METRICS[key], now.recent.get(key)
        why_not = ""
        if now.num_updates < FEWEST_UPDATES:
            why_not = f"too early: {now.num_updates} of {FEWEST_UPDATES} updates"
        elif mean is None:
            why_not = f"not measured: {metric.missing}"
        found.append(Check(metric.title, mean, metric.unit, bound, why_not))
    return found


def checked(now: Situation) -> str:
    """What the verdict on the learning rests on, in a line."""
    found = checks(now)
    known = [check for check in found if check.well is not None]
    if now.num_updates < FEWEST_UPDATES:
        return (
            f"too early to say, {now.num_updates} of the {FEWEST_UPDATES} updates that a verdict "
            "takes"
        )
    text = f"{sum(bool(check.well) for check in known)} of {len(known)} figures inside their bounds"
    missing = len(found) - len(known)
    return f"{text}, {missing} not measured" if missing else text


def learning_word(
    now: Situation, *, service_answers: bool | None, at: datetime | None = None
) -> str:
    """Whether the machinery of learning is healthy, in a word or three: not its results."""
    if service_answers is False:
        return "stopped"
    if now.paused_since is not None:
        return "paused"
    if machinery_troubles(now, at=at):
        return "needs a look"
    if not now.num_updates:
        return "not begun"
    if all(check.well is None for check in checks(now)):
        return "too early to say"
    return "healthy"


def troubles(now: Situation, *, at: datetime | None = None) -> list[str]:
    """What is wrong with the learning or with what comes of it, each with what to do."""
    found = machinery_troubles(now, at=at)
    if progress(now) == "stuck" and now.paused_since is None:
        found.insert(
            0,
            f"After {now.num_scored:,} answers the reward is still low. Look at Learning "
            "health: if entropy is near 0 or the KL to the start is high, roll back under "
            "Controls; else give it time.",
        )
    return found


def machinery_troubles(now: Situation, *, at: datetime | None = None) -> list[str]:
    at = at or datetime.now(UTC)
    found = []
    if now.unscored_share > JUDGE_FAILING:
        found.append(
            f"The judge failed on {now.unscored_share:.0%} of the last answers; they are not "
            "learned from. The reasons stand under Learning health: check the judge."
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
        if check.well is False
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


def sample(count: int, now: Situation) -> str:
    """Of how many answers a figure on the newest is the mean."""
    if count >= RECENT:
        return f"last {RECENT}"
    if now.num_scored > RECENT:
        return f"{count} of the last {RECENT}"
    return f"{count} answer{'s' if count != 1 else ''} since"


def ago(at: datetime, now: datetime) -> str:
    seconds = (now - at).total_seconds()
    return "just now" if seconds < 60 else f"{duration(seconds)} ago"


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
