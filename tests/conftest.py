"""What every test shares: JAX on the CPU with several devices, and Hypothesis without a clock."""

import inspect
import os
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest

# Several CPU devices let the tests run kernels under shard_map; both must be set before JAX
# starts a backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Compiling a kernel takes as long as the machine is busy, so no example has a deadline. On a
# build machine the examples are the same each time, so that a red run can be reproduced.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def line_of() -> Callable[[Callable, str], str]:
    """Returns a function that finds "file:line" of the one line of a function that has a text."""

    def find(function: Callable, text: str) -> str:
        lines, first = inspect.getsourcelines(function)
        [number] = [first + i for i, line in enumerate(lines) if text in line]
        return f"{inspect.getsourcefile(function)}:{number}"

    return find


@pytest.fixture(params=[False, True], ids=["traced", "primitive"])
def form(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs a test with pipelines of each form; True is for those that are a primitive."""
    name = "jax_use_emit_pipeline_primitive"
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield request.param
    jax.config.update(name, before)
