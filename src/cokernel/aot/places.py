"""Finds the user's line that a compiler objects to, also where its message names none.

A program returns nothing, so any number of its first equations are a program as well. The shortest
such beginning that is still refused ends with the equation at fault.
"""

import dataclasses
import functools
import inspect
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np

import cokernel
from cokernel import _jax
from cokernel.aot.memory import is_kernel

_PACKAGE = str(pathlib.Path(cokernel.__file__).parent)
_LINE_IN_TEXT = re.compile(r"(?P<file>[^\s\"'()]+\.py)(?:\"?):(?P<line>\d+)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the user's source a refusal comes from.

    Attributes:
      program: the program's name, empty if it is the function around the kernels.
      line: "file:line", empty if it is not known.
      what: the operation there, or what of the kernel it is.
    """

    program: str
    line: str
    what: str


def is_users(filename: str) -> bool:
    """Returns whether a file is neither JAX's nor Cokernel's."""
    is_pythons = filename.startswith("<frozen ")
    return _jax.is_user_filename(filename) and not filename.startswith(_PACKAGE) and not is_pythons


def line_of_definition(fn: Any) -> str:
    """Returns where the user defines a function, or nothing if another one does."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def line_of_error(error: BaseException) -> str:
    """Returns the innermost line of the user's in the traceback of what went wrong first."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    cause = error.__cause__ or error.__context__
    line = line_of_error(cause) if cause is not None else ""
    return line or _line_of_traceback(error.__traceback__)


def _line_of_traceback(traceback: types.TracebackType | None) -> str:
    line = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        # Text that a library executes, such as the methods of a data class, is in no file of its.
        module = traceback.tb_frame.f_globals.get("__name__", "")
        is_text_of_library = filename == "<string>" and module != "__main__"
        if is_users(filename) and not is_text_of_library:
            line = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def line_in_text(text: str) -> str:
    """Returns the first line of the user's that a message names, or nothing."""
    for found in _LINE_IN_TEXT.finditer(text):
        if is_users(found["file"]) and pathlib.Path(found["file"]).exists():
            return f"{found['file']}:{found['line']}"
    return ""


def find(jaxpr: Any, is_refused: Callable[[Any], bool]) -> Place | None:
    """Returns where a function's kernels are refused, or None if it is not in their programs.

    Args:
      jaxpr: the traced function, which is refused.
      is_refused: returns whether another function, with shorter programs, is refused.
    """
    total = _Count(None)
    _shorten(jaxpr, total)
    if not total.places:
        return None
    if is_refused(_shorten(jaxpr, _Count(0))):
        return None
    accepted, refused = 0, len(total.places)
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        if is_refused(_shorten(jaxpr, _Count(middle))):
            refused = middle
        else:
            accepted = middle
    return total.places[refused - 1]


class _Count:
    """How many more equations of programs are kept, and the places of those met so far."""

    def __init__(self, left: int | None):
        self.left = left
        self.places: list[Place] = []

    def take(self, place: Place) -> bool:
        if self.left is not None:
            if self.left == 0:
                return False
            self.left -= 1
        self.places.append(place)
        return True


def _shorten(jaxpr: Any, count: _Count) -> Any:
    """Returns a function whose kernels' programs keep only as many equations as `count` says."""
    eqns = []
    for eqn in jaxpr.eqns:
        if is_kernel(eqn):
            programs = tuple(
                _shorten_program(program, count, program.debug_info.func_name, "")
                for program in eqn.params["jaxprs"]
            )
            eqns.append(eqn.replace(params={**eqn.params, "jaxprs": programs}))
        else:
            eqns.append(_with_inner(eqn, lambda inner: _shorten(inner, count)))
    return jaxpr.replace(eqns=eqns)


# Whose inner jaxprs may be shortened on their own.
_OPEN = (
    _jax.scan_p,
    _jax.while_p,
    _jax.cond_p,
    _jax.jit_p,
    _jax.pallas_primitives.run_scoped_p,
)


def _shorten_program(jaxpr: Any, count: _Count, program: str, outer_line: str) -> Any:
    eqns = []
    for eqn in jaxpr.eqns:
        frame = _jax.user_frame(eqn.source_info.traceback)
        line = outer_line if frame is None else f"{frame.file_name}:{frame.start_line}"
        if not count.take(Place(program, line, eqn.primitive.name)):
            break
        if eqn.primitive in _OPEN:

            def shorten_inner(inner: Any, line: str = line) -> Any:
                return _shorten_program(inner, count, program, line)

            eqns.append(_with_inner(eqn, shorten_inner))
        else:
            eqns.append(eqn)
    return _with_equations(jaxpr, eqns)


def _with_equations(jaxpr: Any, eqns: list[Any]) -> Any:
    """Returns the jaxpr with these of its equations, and stand-ins for results they do not have."""
    if len(eqns) == len(jaxpr.eqns):
        return jaxpr.replace(eqns=eqns)
    known = {*jaxpr.invars, *jaxpr.constvars}
    known |= {var for eqn in eqns for var in eqn.outvars}
    outvars = []
    for atom in jaxpr.outvars:
        if isinstance(atom, _jax.Literal) or atom in known:
            outvars.append(atom)
        elif not atom.aval.shape:
            outvars.append(_jax.Literal(np.zeros((), atom.aval.dtype)[()], atom.aval))
        else:
            alike = [var for var in known if var.aval == atom.aval]
            if not alike:
                # Nothing can stand in, so this body stays whole.
                return jaxpr
            outvars.append(alike[0])
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _with_inner(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the equation with every jaxpr among its parameters changed."""
    params = {}
    for name, value in eqn.params.items():
        if isinstance(value, _jax.Jaxpr):
            params[name] = change(value)
        elif isinstance(value, tuple) and any(isinstance(item, _jax.Jaxpr) for item in value):
            params[name] = tuple(change(i) if isinstance(i, _jax.Jaxpr) else i for i in value)
        else:
            params[name] = value
    return eqn.replace(params=params)
