"""Marks answers: quality 0 or 1, style 0 or 1, by any model litellm knows or by rules.

    judge = Judge(model="zai/glm-4.7", preferences="archetypes")
    judge.check()
    outcome = await judge.score(messages, answer, style="cute", pool=["academic", "cute"])

`outcome` is a Verdict or Unscored; docs/judge.md explains the marks. Importing this
package loads neither litellm nor any model.
"""

from judge.judge import Judge
from judge.preferences import PreferenceSet, Style, load_preferences
from judge.verdict import JudgeError, Unscored, Verdict

__all__ = [
    "Judge",
    "JudgeError",
    "PreferenceSet",
    "Style",
    "Unscored",
    "Verdict",
    "load_preferences",
]
