"""The rules of all primitives, one module per family."""

import functools
import importlib
import pkgutil

# The families that most kernels need. Rules are looked for here first, so that a kernel does not
# wait for the import of families that have nothing to do with it.
_NEEDED_OFTEN = (
    "control",
    "position",
    "state",
    "scopes",
    "elementwise",
    "logic",
    "convert",
    "shape",
    "reduce",
    "dma",
    "sync",
    "sparsecore_vectors",
    "math",
    "dot",
    "sort",
    "bitcast",
)


@functools.cache
def families() -> tuple[str, ...]:
    """The names of all modules of the package, those that are needed most often first."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return (*_NEEDED_OFTEN, *(name for name in names if name not in _NEEDED_OFTEN))


def load_family(name: str) -> None:
    """Imports a module of the package, which registers its rules."""
    importlib.import_module(f"{__name__}.{name}")


@functools.cache
def load_rules() -> None:
    """Registers the rules of all families."""
    for name in families():
        load_family(name)
