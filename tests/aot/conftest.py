"""The compilers of the chips, each started once; a chip without a compiler here is skipped."""

from collections.abc import Callable, Iterator

import pytest

from cokernel import aot

TPUS = ("v5p", "v6e", "tpu7x")


@pytest.fixture(scope="session")
def compiler_for() -> Iterator[Callable[[str], aot.Compiler]]:
    """Returns a function that gives a chip's compiler, or skips the test with the reason."""
    compilers: dict[str, aot.Compiler] = {}
    missing: dict[str, str] = {}

    def get(name: str) -> aot.Compiler:
        if name not in compilers and name not in missing:
            compiler = aot.Compiler(aot.TARGETS[name])
            try:
                compiler.start()
                compilers[name] = compiler
            except aot.CompilerMissing as error:
                missing[name] = str(error)
        if name in missing:
            pytest.skip(missing[name])
        return compilers[name]

    yield get
    for compiler in compilers.values():
        compiler.__exit__()


@pytest.fixture(params=TPUS)
def tpu(request: pytest.FixtureRequest, compiler_for: Callable) -> aot.Compiler:
    """The compiler of each TPU in turn."""
    return compiler_for(request.param)
