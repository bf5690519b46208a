"""What the tests of slots, rollouts and agents share serves here too: phones and clocks, scripts, families."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("slots", "rollout", "agents")]
