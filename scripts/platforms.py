"""Writes the table of docs/platforms.md: every kernel of the tests and examples, compiled for TPUs.

Run it where the compilers are, as `make test-aot` installs them:

  COKERNEL_AOT_PYTHON=.venv-aot/bin/python .venv/bin/python scripts/platforms.py
"""

import contextlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from cokernel import aot
from tests.aot import corpus, table


def main() -> None:
    """Runs all kernels natively, compiles them, and writes the page."""
    cases = corpus.collect()
    with contextlib.ExitStack() as stack:
        compilers = {
            name: stack.enter_context(aot.Compiler(aot.TARGETS[name])) for name in table.TPUS
        }
        found = table.reports(cases, compilers.__getitem__)
    table.PAGE.write_text(table.page_with(table.text(found), table.PAGE.read_text()))


if __name__ == "__main__":
    main()
