"""Names under which the parts of one endpoint find one another in Ray."""

NAMESPACE = "online_sao"
APP = "online_sao"
DEPLOYMENT = "Endpoint"
BOARD = "weight_board"
LEARNER = "learner"
REWARD_WORKER = "reward_worker"

COLLECTING = "collecting live rollouts"
"""State of value pretraining that waits for clients."""

RUN_DIR_VARIABLE = "ONLINE_SAO_RUN_DIR"
"""Set in the environment of every process of an endpoint: marks which are ours to clean up."""
