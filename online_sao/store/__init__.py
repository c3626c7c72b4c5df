"""Rollouts, weight versions, preferences and events in one SQL database."""

from online_sao.store.store import RolloutStore

__all__ = ["RolloutStore"]
