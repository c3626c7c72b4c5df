"""Settings of the property tests. HYPOTHESIS_PROFILE=few is what the mutation check uses:
the same examples each time, and no search for a smaller one once a test has failed."""

import os

import torch
from hypothesis import Phase, settings

# Small tensors: more threads only add waiting, on a machine that others use too.
torch.set_num_threads(1)

settings.register_profile("algorithm", max_examples=60, deadline=None)
settings.register_profile(
    "few",
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "algorithm"))
