import sys

from gnnfast.cli import main

if __name__ == "__main__":  # not in processes that a benchmark starts
    sys.exit(main())
