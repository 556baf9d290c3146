"""`python -m dgemma`: the same as the script `dgemma`."""

import sys

from dgemma.cli import main

if __name__ == "__main__":
    sys.exit(main())
