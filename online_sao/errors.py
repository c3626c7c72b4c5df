"""Every error this package raises on purpose, one tree.

    OnlineSAOError
    ├── ConfigError            a setting is missing, unknown or out of bounds
    ├── ModelError             a model cannot be found, read or understood
    ├── StoreError             the database refused or cannot be reached
    │   ├── NotFoundError      no such rollout, version or session
    │   └── FencedError        a newer learner has taken over; stop writing
    ├── EngineError            the serving engine failed
    │   └── WeightUpdateError  new weights were refused; the old ones still serve
    ├── LearnerError           an update could not be made
    │   └── CheckpointError    a checkpoint is missing, cut short or not ours
    └── ScenarioError          a scenario definition or its endpoint is unusable

Messages are one sentence that says what is wrong, followed by what to do. Instances
carry only their message, so that they cross process borders (pickle, Ray) unharmed.
"""


class OnlineSAOError(Exception):
    """Base of all errors raised on purpose by online_sao."""


class ConfigError(OnlineSAOError):
    """A setting is missing, unknown or out of bounds."""


class ModelError(OnlineSAOError):
    """A model cannot be found, read or understood."""


class StoreError(OnlineSAOError):
    """The database refused a statement or cannot be reached."""


class NotFoundError(StoreError):
    """No rollout, version or session of that name."""


class FencedError(StoreError):
    """A learner with a newer epoch has taken over; this one must stop writing."""


class EngineError(OnlineSAOError):
    """The serving engine failed."""


class WeightUpdateError(EngineError):
    """New weights were refused; the engine goes on with the old ones."""


class LearnerError(OnlineSAOError):
    """An update could not be made."""


class CheckpointError(LearnerError):
    """A checkpoint is missing, cut short, or was not written by this program."""


class ScenarioError(OnlineSAOError):
    """A scenario definition is unusable, or the endpoint does not answer as it must."""
