"""Lets `python -m cokernel` stand for the `cokernel` command."""

import sys

from cokernel.cli import main

sys.exit(main())
