"""A wheel has this file as ``analyses.py``, beside ``kvlens``: a file gives way to a package ``analyses`` of anybody's."""

import sys

from kvlens.short_name import stand_for_long_name

if __name__ == "analyses":
    stand_for_long_name(__name__)
elif __name__ == "__main__":  # python -m analyses
    from kvlens.analyses.batch.script import main

    sys.exit(main())
