"""Tests of this folder import the helpers of all tests by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
