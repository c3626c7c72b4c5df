"""online_sao: a chat endpoint that keeps learning while it serves.

Importing this package loads no torch, vllm or ray.
"""

from online_sao.config import Config
from online_sao.errors import OnlineSAOError
from online_sao.types import Preference, Rollout, RolloutState, WeightVersion

__version__ = "0.1.0"

__all__ = [
    "Config",
    "OnlineSAOError",
    "Preference",
    "Rollout",
    "RolloutState",
    "WeightVersion",
    "__version__",
]
