"""Whether kernels run in checked mode here: a block, a whole process, or a kernel's own wish."""

import contextlib
from typing import Any

from cokernel import _jax
from cokernel.checking import options
from cokernel.checking.options import Checked

# The options per thread, with a default for all threads. They are part of the key of JAX's caches:
# a function that was jitted without probes is traced again where probes are asked for.
_state: Any = _jax.config_ext.Config(
    "cokernel_checked",
    options.from_environment(),
    include_in_jit_key=True,
    include_in_trace_context=True,
)


def current() -> Checked | None:
    """Returns the options under which kernels run in this thread, None if they run natively."""
    return _state.value


def effective(interpret: Any) -> Checked | None:
    """Returns how a kernel with the argument `interpret=` runs here: its own wish goes first."""
    own = options.from_interpret(interpret)
    return own if own is not None else current()


class checked(contextlib.ContextDecorator):
    """Runs every kernel in a `with` block, or in a decorated function, in checked mode.

    That holds for kernels that are called in the block by this thread, within functions that were
    jitted before as well, and for stock Pallas kernels where `cokernel.pallas` is enabled.

      with cokernel.checked(schedules=20):
          y = f(x)

    Args:
      options: all options at once; otherwise they are given by name as for `cokernel.Checked`.
    """

    def __init__(self, options: Checked | None = None, /, **fields: Any):
        if options is not None and not isinstance(options, Checked):
            raise TypeError(f"checked(...) takes a cokernel.Checked or its fields, got {options!r}")
        self.options = (options or Checked()).replace(**fields)
        # A stack, so that one object can be entered again while it is active.
        self._previous: list[Any] = []

    def _recreate_cm(self) -> "checked":
        return checked(self.options)

    def __enter__(self) -> Checked:
        self._previous.append(_state.swap_local(self.options))
        return self.options

    def __exit__(self, *exc_info: object) -> None:
        _state.set_local(self._previous.pop())


def set_checked(options: Checked | None) -> None:
    """Sets how kernels run in all threads where no `with checked(...)` says otherwise.

    Args:
      options: what to look for, or None for native runs.
    """
    if options is not None and not isinstance(options, Checked):
        raise TypeError(f"set_checked takes a cokernel.Checked or None, got {options!r}")
    _state.set_global(options)
