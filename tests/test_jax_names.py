"""A new JAX release breaks Cokernel in `_jax.py` or not at all."""

import ast
import importlib
import pathlib

import pytest

import cokernel

_PACKAGE = pathlib.Path(cokernel.__file__).parent


def _private_names():
    tree = ast.parse((_PACKAGE / "_jax.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module, alias.name


@pytest.mark.parametrize(("module", "name"), list(_private_names()))
def test_jax_has_the_private_name(module, name):
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        importlib.import_module(f"{module}.{name}")
    assert getattr(imported, name) is not None


def test_no_other_module_imports_private_jax_names():
    offenders = []
    for path in _PACKAGE.rglob("*.py"):
        if path.name == "_jax.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if any(module.startswith(("jax._src", "jaxlib")) for module in modules):
                offenders.append(f"{path.relative_to(_PACKAGE)}:{node.lineno}")
    assert offenders == []


def test_the_list_says_nothing_twice():
    names = list(_private_names())
    assert len(names) > 40
    assert len(set(names)) == len(names)
