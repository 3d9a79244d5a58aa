"""Memory that GPU programs allocate themselves, which in a merged kernel all threads allocate."""

from collections.abc import Sequence
from typing import Any

from cokernel import _jax, primitive


class Allocated:
    """Stands for a type of scratch where Pallas allocates it."""

    def __init__(self, aval: Any, transforms: tuple[Any, ...]):
        self._aval = aval
        self._transforms = transforms

    def get_ref_aval(self) -> Any:
        """Returns the type of the Ref, with the transforms from how it is laid out."""
        if self._transforms:
            return _jax.TransformedRef(self._aval, self._transforms)
        return self._aval


def hoisted(jaxpr: Any, mesh: Any) -> tuple[Any, list[Allocated]]:
    """Returns a program with the memory that it allocates as further inputs, and their types.

    What two programs allocated while they run at the same time could be the same memory.

    Args:
      jaxpr: the program.
      mesh: its mesh.

    Raises:
      NotImplementedError: if it allocates within a loop or branch, where the other programs would
        not take part, or other memory for each of its threads.
    """
    eqns, added = _Hoister(jaxpr, mesh).inlined(jaxpr.eqns, {})
    info = jaxpr.debug_info
    if info.arg_names is not None:
        info = info._replace(arg_names=(*info.arg_names, *[""] * len(added)))
    new = jaxpr.replace(eqns=eqns, invars=[*jaxpr.invars, *added], debug_info=info)
    return new, [Allocated(var.aval, transforms) for var, transforms in added.items()]


class _Hoister:
    """Takes allocations out of one program."""

    def __init__(self, program: Any, mesh: Any):
        self._source = program.debug_info.func_src_info
        self._mesh = mesh

    def inlined(
        self, eqns: Sequence[Any], names: dict[Any, Any]
    ) -> tuple[list[Any], dict[Any, tuple[Any, ...]]]:
        """Returns the equations with the bodies of those that allocate in their place, and
        variables for what they allocate, with transforms. `names` holds what is called otherwise
        outside."""
        kept: list[Any] = []
        added: dict[Any, tuple[Any, ...]] = {}
        for eqn in eqns:
            invars = [_renamed(atom, names) for atom in eqn.invars]
            if _allocates_shared(eqn):
                self._check_collective(eqn)
                inner = eqn.params["jaxpr"]
                fresh = {var: _jax.Var(var.aval) for var in inner.invars}
                local = {**dict(zip(inner.constvars, invars, strict=True)), **fresh}
                added.update(zip(fresh.values(), eqn.params["ref_transforms"], strict=True))
                inner_eqns, inner_added = self.inlined(inner.eqns, local)
                kept += inner_eqns
                added.update(inner_added)
                results = [_renamed(atom, local) for atom in inner.outvars]
                names.update(zip(eqn.outvars, results, strict=True))
            elif eqn.primitive is _jax.pallas_primitives.run_scoped_p:
                # Registers are a thread's own, but within their scope memory may be allocated.
                inner = eqn.params["jaxpr"]
                local = {}
                inner_eqns, inner_added = self.inlined(inner.eqns, local)
                added.update(inner_added)
                new = inner.replace(
                    constvars=[*inner.constvars, *inner_added],
                    # Only their number matters: the values are operands of the equation.
                    consts=[*inner.consts, *inner_added],
                    eqns=inner_eqns,
                    outvars=[_renamed(atom, local) for atom in inner.outvars],
                )
                params = {**eqn.params, "jaxpr": new}
                kept.append(eqn.replace(invars=[*invars, *inner_added], params=params))
            else:
                for inner in _jax.jaxprs_in_params(eqn.params):
                    self._check_allocates_nothing(inner)
                kept.append(eqn.replace(invars=invars))
        return kept, added

    def _check_collective(self, eqn: Any) -> None:
        axes = eqn.params["collective_axes"]
        others = [axis for axis in axes if axis != self._mesh.thread_name]
        place = f"program {self._source} allocates memory at {_line(eqn)}"
        if others:
            raise NotImplementedError(
                f"{place} over the axis {others[0]!r}, but a GPU shares memory only between the "
                "threads of a block: leave the axis out of collective_axes"
            )
        if not axes and (self._mesh.num_threads or 1) > 1:
            raise NotImplementedError(
                f"{place} for each of its {self._mesh.num_threads} threads, but a GPU allocates "
                f"it once: pass collective_axes={self._mesh.thread_name!r} for memory that the "
                "threads share, and give each a part of it"
            )

    def _check_allocates_nothing(self, jaxpr: Any) -> None:
        for eqn in primitive.all_equations(jaxpr):
            if _allocates_shared(eqn):
                raise NotImplementedError(
                    f"program {self._source} allocates memory within a loop or a branch at "
                    f"{_line(eqn)}, where the kernel's other programs take no part: name it in "
                    "scratch_types"
                )


def _allocates_shared(eqn: Any) -> bool:
    """Whether an equation allocates memory, of which registers are none."""
    if eqn.primitive is not _jax.pallas_primitives.run_scoped_p:
        return False
    spaces = {getattr(var.aval, "memory_space", None) for var in eqn.params["jaxpr"].invars}
    return any(getattr(space, "name", "") != "REGS" for space in spaces)


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return names.get(atom, atom) if isinstance(atom, _jax.Var) else atom


def _line(eqn: Any) -> str:
    return _jax.summarize_source(eqn.source_info)
