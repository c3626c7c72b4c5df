"""The outcomes of judging. No third-party imports.

Three things may come of an answer, and they are never confused: a Verdict whose reward is
1, a Verdict whose reward is 0 (the answer is bad, or not in the style asked for), and
Unscored (the judge failed; nothing is known about the answer).
"""

from __future__ import annotations

from dataclasses import dataclass

NO_STYLE = "none"
"""The detected style of an answer that has none of the styles asked about."""


class JudgeError(Exception):
    """The judge cannot work as set up. One sentence: what is wrong and what to do.

    Raised while setting up (loading preferences, `Judge`, `Judge.check`), never by `score`.
    """


@dataclass(frozen=True)
class Verdict:
    """Two marks, each 0 or 1, and where they came from."""

    quality: int
    style: int
    detected_style: str = NO_STYLE
    """The style the judge saw, `none` if it saw none of the pool."""
    rationale: str = ""
    model: str = ""
    latency_s: float = 0.0
    """From the call of `score` to the verdict, waits and retries included."""
    cost: float = 0.0
    """US dollars for all calls made for this verdict, by litellm's price list."""
    raw: str = ""
    """What the judge wrote, unparsed; several votes are joined."""

    @property
    def reward(self) -> int:
        """quality x style."""
        return self.quality * self.style


@dataclass(frozen=True)
class Unscored:
    """The judge gave no verdict. `reason` is a word for counting, `detail` a sentence.

    Reasons: timeout, rate_limited, provider_error, connection, no_key, bad_request,
    circuit_open, empty, cut, unreadable, split_vote, bad_input, internal_error.
    """

    reason: str
    detail: str = ""
    model: str = ""
    latency_s: float = 0.0
    cost: float = 0.0
    """Failed calls may have cost something too."""
    raw: str = ""
