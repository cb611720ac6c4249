"""``python -m kvlens``: the command line."""

import sys

from kvlens.cli import main

if __name__ == "__main__":
    sys.exit(main())
