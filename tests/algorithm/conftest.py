"""Settings of the property tests: HYPOTHESIS_PROFILE=few is what the mutation check uses."""

import os

import torch
from hypothesis import settings

# Small tensors: more threads only add waiting, on a machine that others use too.
torch.set_num_threads(1)

settings.register_profile("algorithm", max_examples=60, deadline=None)
settings.register_profile("few", max_examples=10, deadline=None, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "algorithm"))
