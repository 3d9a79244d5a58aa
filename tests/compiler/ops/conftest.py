"""The chip that the compiler's tests of SparseCores run on."""

from collections.abc import Iterator

import pytest

import cokernel


@pytest.fixture
def v6e() -> Iterator[None]:
    """Compiles for a v6e, whether or not there is one."""
    with cokernel.target("v6e"):
        yield
