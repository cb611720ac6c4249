"""Installed by the wheel as the top-level module ``analyses.py``, so that any other package ``analyses`` takes precedence."""

import sys

from kvlens.short_name import stand_for_long_name

if __name__ == "analyses":
    stand_for_long_name(__name__)
elif __name__ == "__main__":  # python -m analyses
    from kvlens.analyses.batch.script import main

    sys.exit(main())
