"""Makes `learning` (rollouts, settings, learners) importable from the tests of this folder."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Tiny models: more threads only add waiting, on a machine that others use too.
torch.set_num_threads(1)
