"""A kernel made anew for each test."""

import pytest

from tests.runtime_checked.harness import Kernel


@pytest.fixture
def kernel():
    """Makes kernels, which are forgotten after the test."""
    made = []

    def make(*arguments, **options):
        made.append(Kernel(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
