"""A digest of everything that decides a kernel's machine code, taken without emitting any code.

Two kernels with the same fingerprint compile to the same module, so that another process can take
it from the cache. Whatever this module does not know how to spell out exactly makes a kernel
`Unknown`; such a kernel is compiled as if there were no fingerprints.
"""

import dataclasses
import enum
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

import cokernel
from cokernel import _jax
from cokernel.source_lines import user_line

# Parameters of an equation that no rule looks at. Some hold Python functions, which have no digest.
_IGNORED = {
    _jax.jit_p: {
        "in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh",
        "name", "keep_unused", "inline", "compiler_options_kvs",
    },
    _jax.custom_jvp_call_p: {"jvp_jaxpr_fun", "jvp_jaxpr_thunk"},
    _jax.custom_vjp_call_p: {"fwd_jaxpr_thunk", "bwd"},
    _jax.custom_vmap_p: {"rule", "in_tree", "out_tree"},
    _jax.remat_p: {"policy"},
}  # fmt: skip


class Unknown(Exception):
    """Something that has no exact digest."""


def fingerprint(*parts: Any) -> str:
    """A digest of `parts`: jaxprs, meshes, abstract values, options and plain data.

    Raises:
      Unknown: if they contain something that this module cannot spell out.
    """
    writer = _Writer({})
    for part in (_surroundings(), *parts):
        writer.write(part)
    return writer.digest()


def _surroundings() -> tuple[Any, ...]:
    """What else decides the code: the versions of all that takes part in compiling, and JAX's
    settings."""
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    # The settings of this thread and of `with` blocks; what is not plain says where a trace runs.
    local = [
        value
        for value in _jax.config.trace_context()
        if isinstance(value, bool | int | float | str | enum.Enum | None)
    ]
    return (_versions(), settings, local)


@functools.cache
def _versions() -> tuple[str, ...]:
    import llvmlite

    packages = (jax, np, ml_dtypes, llvmlite)
    return (sys.version, *(package.__version__ for package in packages), _source_digest())


@functools.cache
def _source_digest() -> str:
    """A digest of Cokernel's own Python files."""
    top = os.path.dirname(cokernel.__file__)
    digest = hashlib.sha256()
    for folder, subfolders, files in os.walk(top):
        subfolders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb", buffering=0) as file:
                    contents = file.read()
                digest.update(f"{os.path.relpath(path, top)} {len(contents)}\n".encode())
                digest.update(contents)
    return digest.hexdigest()


def _place_of(primitive: Any) -> str:
    """Where JAX keeps a primitive: names alone may be anyone's."""
    attributes = f"{primitive.name}_p", f"{primitive.name.replace('-', '_')}_p"
    modules = _jax_modules(len(sys.modules))
    for module, names in modules:
        for attribute in attributes:
            if names.get(attribute) is primitive:
                return f"{module}.{attribute}"
    # One that is not called like its attribute.
    for module, names in modules:
        for attribute, item in names.items():
            if item is primitive:
                return f"{module}.{attribute}"
    raise Unknown(f"the primitive {primitive.name}")


@functools.lru_cache(maxsize=1)
def _jax_modules(count: int) -> list[tuple[str, dict[str, Any]]]:
    """JAX's own modules while `count` modules are loaded in all."""
    del count
    return [
        (name, vars(sys.modules[name]))
        for name in sorted(sys.modules)
        if name.startswith("jax._src.")
    ]


class _Writer:
    """Spells values out, so that different values never have the same spelling."""

    def __init__(self, known: dict[int, tuple[Any, str]]) -> None:
        self._hash = hashlib.sha256()
        self._pieces: list[str] = []
        # Variables, by identity, in the order of their first appearance.
        self._variables: dict[int, int] = {}
        # Spellings of what appears often and is immutable, by identity, beside the object itself,
        # which keeps the identity from being used again.
        self._known = known

    def digest(self) -> str:
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        self._hash.update("\x1f".join(self._pieces).encode())
        self._pieces.clear()

    def write(self, value: Any) -> None:
        """Adds any value. Raises Unknown."""
        kind = type(value)
        plain = _PLAIN.get(kind)
        if plain is not None:
            self._pieces.append(plain(value))
            return
        if kind is tuple or kind is list:
            self._sequence("(", value)
        elif kind is _jax.Jaxpr:
            self._remembered(value, _Writer._jaxpr)
        elif isinstance(value, _jax.Tracer):
            # A leftover of tracing, which stands for an operand. Its value is known to nobody.
            self._pieces.append("tracer")
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self._array(value)
        elif kind is _jax.ShapedArray or kind is _jax.AbstractRef:
            self._remembered(value, _Writer._aval)
        elif isinstance(value, jax.tree_util.PyTreeDef):
            self._remembered(value, _Writer._tree)
        elif isinstance(value, np.dtype):
            self._pieces.append(_dtype_name(value))
        elif isinstance(value, enum.Enum):
            self._pieces.append(f"enum {_name(kind)} {value.name}")
        elif isinstance(value, Mapping):
            self._sequence(f"map {_name(kind)}", [item for pair in value.items() for item in pair])
        elif isinstance(value, _jax.TypedInt | _jax.TypedFloat | _jax.TypedComplex):
            plain_kind: Any = kind.__base__
            self.write(("number", value.dtype, plain_kind(value)))
        elif isinstance(value, set | frozenset):
            self._sequence(f"set {_name(kind)}", sorted(fingerprint(item) for item in value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            self._sequence(f"data {_name(kind)}", fields)
        elif isinstance(value, tuple | list):
            self._sequence(f"named {_name(kind)}", value)
        elif isinstance(value, type):
            self._pieces.append(f"type {_name(value)}")
        elif isinstance(value, _jax.FlatTree):
            fields = [item for name, item in vars(value).items() if not name.startswith("_hash")]
            self._sequence(f"tree {_name(kind)}", fields)
        elif isinstance(value, _jax.KeyTy | _jax.AbstractSemaphoreTy):
            self._pieces.append(f"dtype {_name(kind)} {value.name}")
        elif value is _jax.UNSPECIFIED:
            self._pieces.append("unspecified")
        else:
            raise Unknown(f"a value of type {_name(kind)}")

    def _sequence(self, opening: str, items: Iterable[Any]) -> None:
        self._pieces.append(opening)
        for item in items:
            self.write(item)
        self._pieces.append(")")

    def _remembered(self, value: Any, spell: Callable[["_Writer", Any], None]) -> None:
        known = self._known.get(id(value))
        if known is None:
            inner = _Writer(self._known)
            spell(inner, value)
            known = self._known[id(value)] = (value, inner.digest())
        self._pieces.append(known[1])

    def _array(self, array: Any) -> None:
        if not isinstance(array.dtype, np.dtype):
            raise Unknown(f"an array of dtype {array.dtype}")
        array = np.asarray(array)
        if array.dtype.hasobject:
            raise Unknown("an array of objects")
        self.write(("array", array.shape, array.dtype))
        self._flush()
        self._hash.update(np.ascontiguousarray(array).tobytes())

    def _aval(self, aval: Any) -> None:
        if isinstance(aval, _jax.AbstractRef):
            self.write(("ref", aval.inner_aval, aval.memory_space, aval.kind))
        else:
            self.write(("aval", aval.shape, aval.dtype, aval.weak_type, aval.memory_space))

    def _tree(self, tree: Any) -> None:
        node = tree.node_data()
        if node is None:
            # A leaf, or nothing at all.
            self.write(("leaves", tree.num_leaves))
        else:
            self.write(("node", *node, *tree.children()))

    # Programs.

    def _jaxpr(self, jaxpr: Any) -> None:
        info = jaxpr.debug_info
        # The names of parameters become names of Refs in reports.
        names = None if info is None else (info.func_name, tuple(info.arg_names or ()))
        self._pieces.append("jaxpr")
        self.write(names)
        self._sequence("consts", jaxpr.consts)
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            self._define(variable)
        for eqn in jaxpr.eqns:
            self._equation(eqn)
        self._pieces.append("out")
        for atom in jaxpr.outvars:
            self._atom(atom)

    def _equation(self, eqn: Any) -> None:
        primitive = eqn.primitive
        self._pieces.append(self._place(primitive))
        for atom in eqn.invars:
            self._atom(atom)
        ignored = _IGNORED.get(primitive, ())
        for key, parameter in eqn.params.items():
            if key not in ignored:
                self._pieces.append(key)
                self.write(parameter)
        self._pieces.append("=")
        for variable in eqn.outvars:
            self._define(variable)
        if eqn.effects:
            self._pieces.extend(sorted(map(self._effect, eqn.effects)))
        self._pieces.append(self._line(eqn.source_info.traceback))

    def _place(self, primitive: Any) -> str:
        known = self._known.get(id(primitive))
        if known is None:
            known = self._known[id(primitive)] = (primitive, _place_of(primitive))
        return known[1]

    def _define(self, variable: Any) -> None:
        if isinstance(variable, _jax.DropVar):
            self._pieces.append("_")
        else:
            number = self._variables[id(variable)] = len(self._variables)
            self._pieces.append(f"v{number}")
        self.write(variable.aval)

    def _atom(self, atom: Any) -> None:
        if isinstance(atom, _jax.Literal):
            self.write(("literal", atom.val, atom.aval))
        else:
            self._pieces.append(f"v{self._variables[id(atom)]}")

    def _effect(self, effect: Any) -> str:
        name = _name(type(effect))
        if isinstance(effect, _jax.JaxprInputEffect):
            target = effect.input
            where = target if isinstance(target, int) else f"v{self._variables.get(id(target))}"
            return f"effect {name} {where}"
        if isinstance(effect, _jax.NamedAxisEffect):
            return f"effect {name} {effect.name!r}"
        # Of the others the compiler asks only what kind they are.
        return f"effect {name}"

    def _line(self, traceback: Any) -> str:
        # Equations that one call makes share a traceback.
        known = self._known.get(id(traceback))
        if known is None:
            known = self._known[id(traceback)] = (traceback, repr(user_line(traceback)))
        return known[1]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _dtype_name(dtype: np.dtype) -> str:
    if dtype.fields is not None or dtype.subdtype is not None:
        raise Unknown(f"the dtype {dtype}")
    return f"dtype {dtype.name} {dtype.str}"


# Strings are given with their length in front, so that nothing inside one looks like another piece.
_PLAIN: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "None",
    bool: repr,
    int: repr,
    float: lambda value: value.hex(),
    complex: lambda value: f"{value.real.hex()} {value.imag.hex()} complex",
    str: lambda value: f"{len(value)} {value!r}",
    bytes: lambda value: f"{len(value)} {value!r}",
    type(Ellipsis): lambda value: "...",
}
