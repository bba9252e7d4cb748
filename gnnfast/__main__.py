import sys

from gnnfast.cli import main

sys.exit(main())
