"""What the whole kernels share: how many workers run them, and the chip they are written for."""

import inspect
from collections.abc import Callable, Iterator

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


@pytest.fixture(scope="session")
def line_of() -> Callable[[Callable, str], str]:
    """Returns a function that finds "file:line" of the one line of a function that has a text."""

    def find(function: Callable, text: str) -> str:
        lines, first = inspect.getsourcelines(function)
        [number] = [first + i for i, line in enumerate(lines) if text in line]
        return f"{inspect.getsourcefile(function)}:{number}"

    return find
