"""``python -m analyses NAME ...`` in a clone: the same as ``kvlens analyse NAME ...``."""

import sys

from kvlens.analyses.batch.script import main

sys.exit(main())
