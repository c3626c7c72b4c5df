"""Makes what other folders' tests use importable here: rollouts, a served endpoint, a judge."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("learner", "judge", "service", "engine")]
