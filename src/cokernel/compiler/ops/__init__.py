"""The rules of all primitives, one module per family."""

import functools
import importlib
import pkgutil


@functools.cache
def load_rules() -> None:
    """Imports every module of the package, each of which registers its rules."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
