"""Classes of fields that are cheap to define.

`dataclasses.dataclass` writes the methods of each class as source text and compiles that, which
takes about half a millisecond. The compiler is imported when the first kernel is compiled and has
dozens of such classes, so that a sixth of the time until its result went there. The methods here
are closures; whatever reads the fields of a dataclass, `dataclasses.replace` for one, takes these
classes as well.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The same for whoever checks types.
    from dataclasses import dataclass as record
else:

    def record(cls: type | None = None, /, *, frozen: bool = False, eq: bool = True) -> Any:
        """Like `dataclasses.dataclass` with these options, for classes without `__post_init__`."""
        if cls is None:
            return lambda cls: _with_methods(cls, frozen, eq)
        return _with_methods(cls, frozen, eq)


def _with_methods(cls: Any, frozen: bool, eq: bool) -> type:
    # Without a text, the standard library makes one of the signature, which takes longer still.
    cls.__doc__ = cls.__doc__ or cls.__name__
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False)(cls)
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    compared = tuple(field.name for field in fields if field.compare)
    methods: dict[str, Any] = {
        "__init__": _initialiser(cls, fields),
        "__repr__": _representer(names),
        "__match_args__": names,
    }
    if eq:
        methods["__eq__"] = _comparer(compared)
        methods["__hash__"] = _hasher(compared) if frozen else None
    if frozen:
        methods["__setattr__"] = methods["__delattr__"] = _refuse
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return cls


def _initialiser(cls: type, fields: tuple[dataclasses.Field, ...]) -> Callable[..., None]:
    names = tuple(field.name for field in fields)
    defaults = {field.name: field.default for field in fields}
    missing: Any = dataclasses.MISSING
    makers: dict[str, Any] = {field.name: field.default_factory for field in fields}
    # Frozen classes refuse the ordinary way.
    assign = object.__setattr__

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        if len(values) > len(names):
            raise TypeError(f"{cls.__qualname__} has {len(names)} fields, not {len(values)}")
        for name, value in zip(names, values, strict=False):
            assign(self, name, value)
        for name in names[len(values) :]:
            if name in named:
                assign(self, name, named.pop(name))
            elif defaults[name] is not missing:
                assign(self, name, defaults[name])
            elif makers[name] is not missing:
                assign(self, name, makers[name]())
            else:
                raise TypeError(f"{cls.__qualname__} is not given its field {name!r}")
        if named:
            name = next(iter(named))
            raise TypeError(f"{cls.__qualname__} has no field {name!r}, or is given it twice")

    return __init__


def _representer(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({fields})"

    return __repr__


def _comparer(names: tuple[str, ...]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__


def _hasher(names: tuple[str, ...]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(tuple([getattr(self, name) for name in names]))

    return __hash__


def _refuse(self: Any, name: str, *value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"{name!r} of a frozen {type(self).__qualname__}")
