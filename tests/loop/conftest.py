"""The phones of the tests of slots and the scripted policies of the tests of rollouts serve here too."""

import sys
from pathlib import Path

for folder in ("slots", "rollout"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
