"""`python -m stepwell` is the command `stepwell`."""

import sys

from stepwell.cli import main

if __name__ == "__main__":
    sys.exit(main())
