"""``python -m analyses NAME ...``: the same as ``kvlens analyse NAME ...``."""

import sys

from .batch.script import main

sys.exit(main())
