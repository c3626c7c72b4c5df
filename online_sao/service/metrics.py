"""The numbers of `/metrics`, in Prometheus' text form. docs/metrics.md defines each.

Two kinds: what this replica counts itself (requests), and what is asked of the learner, the
judge's worker and the store at each scrape. A part that does not answer shows as `up` 0, and
its numbers are left out, as stale ones would hide that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# The routes of the contract; any other path is counted as "other", so that nobody can make
# labels without end.
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/rollouts",
    "/v1/sessions",
    "/v1/feedback",
    "/v1/preference",
    "/v1/learning",
    "/health",
    "/ready",
    "/metrics",
)


@dataclass(frozen=True)
class Definition:
    """A number that is asked for at each scrape."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


SCRAPED = (
    Definition("online_sao_up", "1 if the part answers: learner, judge, store.", ("part",)),
    Definition("online_sao_replica_version", "Weight version that this replica serves."),
    Definition("online_sao_learner_version", "Newest weight version of the learner."),
    Definition("online_sao_published_version", "Newest weight version that was published."),
    Definition("online_sao_updates", "Updates behind the current weights."),
    Definition("online_sao_paused", "1 while learning is paused."),
    Definition("online_sao_trained_per_minute", "Rollouts trained per minute, last two minutes."),
    Definition("online_sao_rollouts", "Rollouts in the store by state.", ("state",)),
    Definition("online_sao_reasons", "Rollouts by state and reason.", ("state", "reason")),
    Definition("online_sao_unrecorded", "Answers of this replica that the store refused."),
    Definition("online_sao_ongoing", "Requests that this replica is answering."),
    Definition("online_sao_judge_in_flight", "Answers that the judge is marking."),
    Definition("online_sao_judge_outcomes", "Outcomes since the judge's start.", ("outcome",)),
    Definition("online_sao_judge_cost", "US dollars since the judge's start."),
    Definition("online_sao_update_metric", "Metrics of the newest update.", ("metric",)),
    Definition("online_sao_guard_value", "A guard's number over its window.", ("guard",)),
    Definition("online_sao_guard_bound", "The bound at which a guard fires.", ("guard",)),
    Definition("online_sao_guard_fired_version", "Version at the last firing.", ("guard",)),
    Definition("online_sao_probe_quality", "Held-out quality of the newest round of probes."),
    Definition("online_sao_probe_reward", "Held-out reward of the newest round of probes."),
)
_BY_NAME = {definition.name: definition for definition in SCRAPED}


class Metrics:
    """One per replica."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "online_sao_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "online_sao_request_seconds",
            "From the request's head to the answer's last byte.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        route = route_of(path)
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self, samples: Iterable[tuple[str, Mapping[str, str], float | None]]) -> bytes:
        """Prometheus' text: our own counters, and `samples` as (name, labels, value)."""
        registry = CollectorRegistry()
        gauges: dict[str, Gauge] = {}
        for name, labels, value in samples:
            if value is None:
                continue
            if name not in gauges:
                known = _BY_NAME[name]
                gauges[name] = Gauge(name, known.help, known.labels, registry=registry)
            gauge = gauges[name].labels(**labels) if labels else gauges[name]
            gauge.set(value)
        return generate_latest(self._registry) + generate_latest(registry)


def route_of(path: str) -> str:
    for route in ROUTES:
        if path == route or path.startswith(route + "/"):
            return route
    return "other"


Sample = tuple[str, Mapping[str, str], float | None]


def learner_samples(status: Mapping[str, Any] | None) -> list[Sample]:
    """From `LearnerActor.status`; None: it does not answer."""
    if status is None:
        return [("online_sao_up", {"part": "learner"}, 0)]
    is_up = status["state"] not in ("failed", "replaced", "stopped")
    samples: list[Sample] = [
        ("online_sao_up", {"part": "learner"}, float(is_up)),
        ("online_sao_learner_version", {}, status.get("version")),
        ("online_sao_published_version", {}, status.get("published_version")),
        ("online_sao_updates", {}, status.get("num_updates")),
        ("online_sao_paused", {}, float(bool(status.get("paused")))),
        ("online_sao_trained_per_minute", {}, status.get("rollouts_per_minute")),
    ]
    for name, value in status.get("metrics", {}).items():
        samples.append(("online_sao_update_metric", {"metric": name}, value))
    guards = status.get("guards", {})
    for guard, value in guards.get("values", {}).items():
        samples.append(("online_sao_guard_value", {"guard": guard}, value))
    for guard, bound in guards.get("bounds", {}).items():
        samples.append(("online_sao_guard_bound", {"guard": guard}, bound))
    fired = guards.get("last_firing")
    if fired:
        labels = {"guard": fired["guard"]}
        samples.append(("online_sao_guard_fired_version", labels, fired["weight_version"]))
    probe = guards.get("probe", {})
    samples.append(("online_sao_probe_quality", {}, probe.get("quality")))
    samples.append(("online_sao_probe_reward", {}, probe.get("reward")))
    return samples


def judge_samples(status: Mapping[str, Any] | None) -> list[Sample]:
    """From `RewardWorker.status`; None: it does not answer."""
    if status is None:
        return [("online_sao_up", {"part": "judge"}, 0)]
    return [
        ("online_sao_up", {"part": "judge"}, 1),
        ("online_sao_judge_in_flight", {}, status["in_flight"]),
        ("online_sao_judge_outcomes", {"outcome": "scored"}, status["scored"]),
        ("online_sao_judge_outcomes", {"outcome": "unscored"}, status["unscored"]),
        ("online_sao_judge_cost", {}, status["cost"]),
    ]


def store_samples(
    counts: Mapping[Any, int] | None, reasons: Mapping[tuple[Any, str], int] | None
) -> list[Sample]:
    """From `RolloutStore.counts` and `reason_counts`; None: the store refused."""
    if counts is None or reasons is None:
        return [("online_sao_up", {"part": "store"}, 0)]
    samples: list[Sample] = [("online_sao_up", {"part": "store"}, 1)]
    for state, number in counts.items():
        samples.append(("online_sao_rollouts", {"state": str(state)}, number))
    for (state, reason), number in reasons.items():
        samples.append(("online_sao_reasons", {"state": str(state), "reason": reason}, number))
    return samples
