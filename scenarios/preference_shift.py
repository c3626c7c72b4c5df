"""The paper's online learning simulation (section 4.5): the preferred style moves on, twice.

Claim: after each switch of the preference (cute, then chuunibyou, then classical) an endpoint
that learns with SAO follows. Training reward recovers within the phase; on held-out topics
the old style is suppressed and the new one rises. The running mean of past rewards, the
baseline it is compared with, notices a switch later and settles lower.

    online-sao serve &
    python scenarios/preference_shift.py --preset sao

The definition is preference_shift.toml beside this file; scenarios/README.md says how to
read the results. An HTTP client only: the endpoint may be anywhere (--url).
"""

import sys
from pathlib import Path

import live

if __name__ == "__main__":
    sys.exit(live.main(default=Path(__file__).with_suffix(".toml")))
