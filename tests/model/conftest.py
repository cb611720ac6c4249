"""Models for the tests of this folder; siblings import each other's helpers by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
