"""`python -m trunkline`: the same as the `trunkline` command. Read `cli.py`."""

from __future__ import annotations

import sys

from trunkline.cli import main

if __name__ == "__main__":
    sys.exit(main())
