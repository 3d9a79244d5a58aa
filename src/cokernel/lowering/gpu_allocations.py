"""Memory that GPU programs allocate themselves, which in a merged kernel all threads allocate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cokernel import _jax, primitive

# What is allocated, by its variable, with the transforms from how it is laid out.
_Added = dict[Any, tuple[Any, ...]]


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

    What two programs allocated while they run at the same time could be the same memory. What a
    loop or a branch allocates, which the other programs would not take part in, is allocated once,
    before all programs begin.

    Args:
      jaxpr: the program.
      mesh: its mesh.

    Raises:
      NotImplementedError: if it allocates a barrier or a semaphore within a loop, or other memory
        for each of its threads.
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
        self, eqns: Sequence[Any], names: dict[Any, Any], *, repeats: bool = False
    ) -> tuple[list[Any], _Added]:
        """Returns the equations with the bodies of those that allocate in their place, and
        variables for what they allocate, with transforms.

        Args:
          eqns: the equations.
          names: what is called otherwise outside; results of what is inlined are added.
          repeats: whether they are within a loop.
        """
        kept: list[Any] = []
        added: _Added = {}
        for eqn in eqns:
            invars = [_renamed(atom, names) for atom in eqn.invars]
            outer = eqn.replace(invars=invars, effects=_renamed_effects(eqn.effects, names))
            if _allocates_shared(eqn):
                kept += self._body_of_scope(outer, names, added, repeats=repeats)
            elif not any(map(_has_allocations, _jax.jaxprs_in_params(eqn.params))):
                kept.append(outer)
            else:
                kept.append(self._with_allocations_outside(outer, added, repeats=repeats))
        return kept, added

    def _body_of_scope(
        self, eqn: Any, names: dict[Any, Any], added: _Added, *, repeats: bool
    ) -> list[Any]:
        self._check_collective(eqn)
        inner = eqn.params["jaxpr"]
        fresh = {var: _jax.Var(var.aval) for var in inner.invars}
        if repeats:
            self._check_needs_no_start(eqn)
        added.update(zip(fresh.values(), eqn.params["ref_transforms"], strict=True))
        entered: list[Any] = []
        if repeats and (self._mesh.num_threads or 1) > 1:
            # As in a kernel of one program, all threads have left the scope before one enters it
            # again.
            barrier, entered = self._all_threads_meet(eqn)
            added[barrier] = ()
        local = {**dict(zip(inner.constvars, eqn.invars, strict=True)), **fresh}
        inner_eqns, inner_added = self.inlined(inner.eqns, local, repeats=repeats)
        added.update(inner_added)
        results = [_renamed(atom, local) for atom in inner.outvars]
        names.update(zip(eqn.outvars, results, strict=True))
        return [*entered, *inner_eqns]

    def _with_allocations_outside(self, eqn: Any, added: _Added, *, repeats: bool) -> Any:
        """Returns a loop, a branch or a scope of registers that is handed what was allocated
        within."""
        params = dict(eqn.params)
        match eqn.primitive:
            case _jax.pallas_primitives.run_scoped_p:
                inner, found = self._body(eqn.params["jaxpr"], repeats=repeats)
                params["jaxpr"] = inner.replace(
                    constvars=[*inner.constvars, *found],
                    # Only their number matters: the values are operands of the equation.
                    consts=[*inner.consts, *found],
                )
                invars = [*eqn.invars, *found]
            case _jax.scan_p:
                inner, found = self._body(eqn.params["jaxpr"], repeats=True)
                params["jaxpr"] = inner.replace(invars=[*found, *inner.invars])
                constants, carried, sequences = eqn.params["ft_in"].unpack()
                constants = (_jax.flat_tree_of_nothing(len(found)), constants)
                params["ft_in"] = _jax.pack_flat_trees((constants, carried, sequences))
                invars = [*found, *eqn.invars]
            case _jax.while_p:
                self._check_allocates_nothing(eqn.params["cond_jaxpr"], "the condition of a loop")
                inner, found = self._body(eqn.params["body_jaxpr"], repeats=True)
                params["body_jaxpr"] = inner.replace(invars=[*found, *inner.invars])
                params["body_nconsts"] += len(found)
                of_condition = eqn.params["cond_nconsts"]
                invars = [*eqn.invars[:of_condition], *found, *eqn.invars[of_condition:]]
            case _jax.cond_p:
                found, branches = {}, []
                for branch in eqn.params["branches"]:
                    inner, own = self._body(branch, repeats=repeats)
                    found.update(own)
                    branches.append(inner)
                # All branches are given what one of them has allocated, in variables of its own.
                params["branches"] = tuple(_given(branch, list(found)) for branch in branches)
                invars = [eqn.invars[0], *found, *eqn.invars[1:]]
            case _:
                for inner in _jax.jaxprs_in_params(eqn.params):
                    self._check_allocates_nothing(inner, eqn.primitive.name)
                raise AssertionError("there are allocations within")
        added.update(found)
        return eqn.replace(invars=invars, params=params)

    def _body(self, jaxpr: Any, *, repeats: bool) -> tuple[Any, _Added]:
        """Returns a body that uses memory of its surroundings, and what it uses."""
        names: dict[Any, Any] = {}
        eqns, found = self.inlined(jaxpr.eqns, names, repeats=repeats)
        given = {*jaxpr.constvars, *jaxpr.invars, *found}
        effects = {
            effect
            for eqn in eqns
            for effect in eqn.effects
            if not isinstance(effect, _jax.JaxprInputEffect) or effect.input in given
        }
        outvars = [_renamed(atom, names) for atom in jaxpr.outvars]
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        return jaxpr.replace(eqns=eqns, outvars=outvars, effects=effects, debug_info=info), found

    def _all_threads_meet(self, eqn: Any) -> tuple[Any, list[Any]]:
        """Returns a barrier, and equations in which all threads of the program wait for each
        other there."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def meet(barrier: Any) -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        aval = plgpu.Barrier(num_arrivals=self._mesh.num_threads).get_ref_aval()
        tree = _jax.flatten_to_tree(((aval,), {}))
        with primitive.tracing_context(self._mesh, [self._mesh], None):
            jaxpr, _ = _jax.trace_to_jaxpr(meet, tree, eqn.params["jaxpr"].debug_info)
        return jaxpr.invars[0], [inner.replace(source_info=eqn.source_info) for inner in jaxpr.eqns]

    def _check_needs_no_start(self, eqn: Any) -> None:
        """Checks that memory which is allocated in a loop is as good if it is allocated once."""
        for var in eqn.params["jaxpr"].invars:
            dtype = getattr(getattr(var.aval, "inner_aval", var.aval), "dtype", None)
            if not isinstance(dtype, np.dtype):
                raise NotImplementedError(
                    f"program {self._source} allocates {var.aval} in a loop at {_line(eqn)}, which "
                    "would have to begin anew each time, but a kernel of several programs "
                    "allocates it once: name it in scratch_types, or allocate it before the loop"
                )

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

    def _check_allocates_nothing(self, jaxpr: Any, where: str) -> None:
        for eqn in primitive.all_equations(jaxpr):
            if _allocates_shared(eqn):
                raise NotImplementedError(
                    f"program {self._source} allocates memory within {where} at {_line(eqn)}, "
                    "where the kernel's other programs take no part: name it in scratch_types"
                )


def _given(branch: Any, variables: Sequence[Any]) -> Any:
    """Returns a branch with these as its first inputs."""
    fresh = {var: _jax.Var(var.aval) for var in variables}
    renamed = branch.replace(invars=[*variables, *branch.invars])
    return _renamed_inputs(renamed, fresh)


def _renamed_inputs(jaxpr: Any, names: dict[Any, Any]) -> Any:
    eqns = [
        eqn.replace(
            invars=[_renamed(atom, names) for atom in eqn.invars],
            effects=_renamed_effects(eqn.effects, names),
        )
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(
        invars=[names.get(var, var) for var in jaxpr.invars],
        eqns=eqns,
        outvars=[_renamed(atom, names) for atom in jaxpr.outvars],
        effects=_renamed_effects(jaxpr.effects, names),
    )


def _renamed_effects(effects: Any, names: dict[Any, Any]) -> set[Any]:
    return {
        effect.replace(names[effect.input])
        if isinstance(effect, _jax.JaxprInputEffect) and effect.input in names
        else effect
        for effect in effects
    }


def _has_allocations(jaxpr: Any) -> bool:
    return any(map(_allocates_shared, primitive.all_equations(jaxpr)))


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
