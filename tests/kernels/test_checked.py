"""The whole kernels and the stock examples in checked mode: no finding where nothing is wrong.

They are run by a pytest of their own with the plugin, which also says what it looked at.
"""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
# What fails on purpose, what measures the memory of many launches, and this file itself.
WITHOUT = (
    "kernels/test_checked.py",
    "kernels/test_failing_kernels.py",
    "kernels/test_flat_memory.py",
)
# Examples that leave memory unwritten on purpose: see below.
LEAVE_MEMORY_UNWRITTEN = ("mixture_of_experts", "paged_cache")


def checked_run(selection: str, *paths: str, options: str = "", schedules: int = 3) -> str:
    """Runs the selected tests in checked mode, in a process of its own; returns what it says."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "cokernel.checking.pytest_plugin", f"--cokernel-check={schedules}"),
            *("--cokernel-check-options", options, "-k", selection),
            *(f"--ignore={TESTS / path}" for path in WITHOUT),
            *(str(TESTS / path) for path in paths),
        ],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.stdout


def kernels_and_findings(text: str) -> tuple[int, int]:
    """How many kernels ran and how many different findings there are."""
    found = re.search(r"\d+ launch\w* of (\d+) kernels?, (\d+) (?:different )?finding", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def test_nothing_is_found_in_whole_kernels_and_stock_examples():
    examples = f"v6e-2-1 and not {' and not '.join(LEAVE_MEMORY_UNWRITTEN)}"
    text = checked_run(f"1_workers or ({examples})", "kernels", "test_stock_examples.py")
    kernels, findings = kernels_and_findings(text)
    assert findings == 0, text
    assert " failed" not in text, text
    assert kernels >= 25, text


def test_of_examples_that_leave_memory_unwritten_nothing_else_is_found():
    """One hands on the places of pages that no sequence needs, the other leaves rows of a buffer
    free; what is there is masked outside the kernel, which checked mode cannot know."""
    examples = f"v6e-2-1 and ({' or '.join(LEAVE_MEMORY_UNWRITTEN)})"
    text = checked_run(examples, "test_stock_examples.py")
    summary = text.partition("cokernel: checked mode")[2]
    told = re.findall(r"^  (\w+): ", summary, re.MULTILINE)
    assert sorted(word for word in told if word != "Replay") == [
        "NeverWritten",
        "UninitialisedRead",
    ], text

    text = checked_run(examples, "test_stock_examples.py", options="uninitialised=off")
    assert kernels_and_findings(text) == (3, 0), text
    assert " failed" not in text, text
