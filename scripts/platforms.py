"""Writes the tables of docs/platforms.md: kernels of the tests and examples, compiled for chips.

Run it where the compilers are, as `make test-aot` installs them:

  COKERNEL_AOT_PYTHON=.venv-aot/bin/python .venv/bin/python scripts/platforms.py

It writes both tables, or the one that is named: TPUs or GPUs.
"""

import contextlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from cokernel import aot
from tests.aot import corpus, table

KINDS = {
    "TPUs": (table.TPUS, corpus.collect, table.reports),
    "GPUs": (table.GPUS, corpus.collect_gpu, table.gpu_reports),
}


def main() -> None:
    """Runs all kernels on this machine, compiles them, and writes the page."""
    for kind in sys.argv[1:] or KINDS:
        chips, collect, reports = KINDS[kind]
        cases = collect()
        with contextlib.ExitStack() as stack:
            compilers = {
                name: stack.enter_context(aot.Compiler(aot.TARGETS[name])) for name in chips
            }
            found = reports(cases, compilers.__getitem__)
        page = table.page_with(kind, table.text(found), table.PAGE.read_text())
        table.PAGE.write_text(page)


if __name__ == "__main__":
    main()
