"""What the whole kernels share: how many workers run them, and the chip they are written for."""

from collections.abc import Iterator

import pytest

import cokernel


@pytest.fixture(params=(1, 2, 4), ids="{}_workers".format)
def compiler_params(request: pytest.FixtureRequest) -> cokernel.CompilerParams:
    """One, two and four workers; a kernel that hangs for a reason not foreseen fails."""
    return cokernel.CompilerParams(num_workers=request.param, time_limit_s=120)


@pytest.fixture
def v6e() -> Iterator[None]:
    """Pretends a chip with one TensorCore and two SparseCores of sixteen subcores each."""
    with cokernel.target("v6e"):
        yield
