"""TPU kernels with programs for TensorCores and for SparseCores: two calls that overlap.

Mosaic compiles no TensorCore program and SparseCore program into one kernel. So the SparseCores'
programs become one call and the TensorCores' another, and XLA schedules the second between the
start and the end of the first. What both use must exist before either starts, and outlive both:

  allocate   makes what programs of both kinds use: scratch in HBM, semaphores of the TensorCores,
             and arrays in place of inputs and outputs that both kinds read and write;
  sparse     and
  tensor     run the programs, and write what only their own kind writes;
  finish     copies those arrays to the outputs, once both calls have ended.

XLA takes what `allocate` made for constant inputs of the two calls, and so copies none of it.
`cokernel.aot` checks on the compiled schedule that the calls overlap and share that memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cokernel import _jax
from cokernel.lowering import stock

# The attribute of a call that says which of the four it is.
PART_ATTRIBUTE = "kernel_part"
ALLOCATE, SPARSE, TENSOR, FINISH = "allocate", "sparse", "tensor", "finish"

# What a call returns if nothing else, so that XLA knows when it has ended.
_TOKEN = _jax.ShapedArray((128,), np.dtype(np.int32))


def is_mixed(meshes: Sequence[Any]) -> bool:
    """Returns whether a kernel has programs for TensorCores and for SparseCores."""
    on_tensor_core = [isinstance(mesh, _jax.TensorCoreMesh) for mesh in meshes]
    return any(on_tensor_core) and not all(on_tensor_core)


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a mixed kernel to up to four custom calls of Mosaic.

    Raises:
      NotImplementedError: for a kernel whose TensorCore uses the memory or the semaphores of a
        SparseCore, or the other way round but for signals to the TensorCore.
    """
    kernel = _Kernel(len(operands), params)
    block = _jax.mlir.ir.InsertionPoint.current.block
    num_operations = len(block.operations)
    rule = _jax.mlir.lower_fun(kernel.run, multiple_results=True)
    results = rule(ctx, *operands)
    calls = [
        operation
        for operation in list(block.operations)[num_operations:]
        if operation.operation.name == "stablehlo.custom_call"
    ]
    ir = _jax.mlir.ir
    for part, call in zip(kernel.parts, calls, strict=True):
        known = {}
        if "mhlo.frontend_attributes" in call.attributes:
            known = {item.name: item.attr for item in call.attributes["mhlo.frontend_attributes"]}
        known[PART_ATTRIBUTE] = ir.StringAttr.get(part)
        call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(known)
    return results


@dataclasses.dataclass(frozen=True)
class _Group:
    """The programs of one kind, and the positions of the variables that they use."""

    part: str
    meshes: tuple[Any, ...]
    jaxprs: tuple[Any, ...]
    uses: frozenset[int]

    @classmethod
    def of(cls, part: str, programs: Sequence[tuple[Any, Any]]) -> "_Group":
        uses: set[int] = set()
        for _, jaxpr in programs:
            uses.update(jaxpr.invars.index(var) for var in _first_uses(jaxpr))
        meshes, jaxprs = zip(*programs, strict=True)
        return cls(part, meshes, jaxprs, frozenset(uses))


class _Kernel:
    """A mixed kernel, and where each of its variables lives.

    Variables are numbered as in the programs: inputs, outputs, scratch. Programs that use an output
    which overwrites an input are made to use the input.
    """

    def __init__(self, num_inputs: int, params: Mapping[str, Any]):
        self._params = params
        self._num_inputs = num_inputs
        self._num_outputs = len(params["out_avals"])
        # The input that each output, by its index, overwrites.
        self._overwritten = {o: i for i, o in params["input_output_aliases"]}
        same = {num_inputs + o: i for o, i in self._overwritten.items()}
        jaxprs = [_renamed(jaxpr, same) for jaxpr in params["jaxprs"]]
        programs = list(zip(params["meshes"], jaxprs, strict=True))
        self._tensor_mesh = next(m for m in params["meshes"] if isinstance(m, _jax.TensorCoreMesh))
        self._tensor = _Group.of(TENSOR, [p for p in programs if p[0] is self._tensor_mesh])
        self._sparse = _Group.of(SPARSE, [p for p in programs if p[0] is not self._tensor_mesh])
        self._avals = [var.aval for var in jaxprs[0].invars]
        for group in (self._tensor, self._sparse):
            self._check_reach(group)
        used_by_both = sorted(self._tensor.uses & self._sparse.uses)
        # Both calls can read an input, but what one of them writes needs a place of its own.
        self._shared = [
            index
            for index in used_by_both
            if index >= num_inputs or index in self._overwritten.values()
        ]
        self._copied = [o for o in range(self._num_outputs) if self._home(o) in self._shared]

    @property
    def parts(self) -> list[str]:
        """The calls in the order in which `run` makes them."""
        first = [ALLOCATE] if self._shared else []
        last = [FINISH] if self._copied else []
        return [*first, SPARSE, TENSOR, *last]

    def run(self, *inputs: Any) -> list[Any]:
        """Makes the calls, in a function that JAX traces."""
        shared: dict[int, Any] = {}
        if self._shared:
            shared = dict(zip(self._shared, self._allocate(inputs), strict=True))
        outputs: dict[int, Any] = {}
        tokens = []
        for group in (self._sparse, self._tensor):
            results, token = self._call(group, inputs, shared)
            outputs.update(results)
            tokens += token
        if self._copied:
            outputs.update(self._finish(shared, tokens))
        # Who wants results of one call waits for both, so that XLA has no reason to end one before
        # it begins the other.
        return lax.optimization_barrier([outputs[output] for output in range(self._num_outputs)])

    def _home(self, output: int) -> int:
        """Returns the number of the variable that holds an output."""
        return self._overwritten.get(output, self._num_inputs + output)

    def _check_reach(self, group: _Group) -> None:
        """Checks that programs of one kind use only memory that their kind of core reaches."""
        for mesh, jaxpr in zip(group.meshes, group.jaxprs, strict=True):
            for var, eqn in _first_uses(jaxpr).items():
                space = var.aval.memory_space
                if not isinstance(space, _jax.CoreMemorySpace):
                    on_tensor_core = mesh is self._tensor_mesh
                    is_sparse = space == _jax.TpuMemorySpace.VMEM_SHARED
                    if not (is_sparse and on_tensor_core):
                        continue
                    reason = "which only SparseCores reach"
                elif (space.mesh is self._tensor_mesh) == (mesh is self._tensor_mesh):
                    continue
                elif space.memory_space != _jax.TpuMemorySpace.SEMAPHORE:
                    reason = f"the memory of {space.mesh}, which its cores do not reach"
                elif space.mesh is self._tensor_mesh:
                    # SparseCores may signal TensorCores.
                    continue
                else:
                    reason = (
                        "a semaphore of SparseCores, which TensorCores cannot signal: let the "
                        "TensorCore copy a flag to HBM, and the SparseCore copy it and look at it "
                        "until it is set"
                    )
                raise NotImplementedError(
                    f"kernel {self._params['name']!r} cannot run on a TPU: program "
                    f"{jaxpr.debug_info.func_src_info} on {mesh} uses {_name(jaxpr, var)!r} at "
                    f"{_jax.summarize_source(eqn.source_info)}, {reason}"
                )

    def _allocate(self, inputs: Sequence[Any]) -> Any:
        sources = {index: inputs[index] for index in self._shared if index < self._num_inputs}
        targets = [self._shared.index(index) for index in sources]
        # It is given the other inputs too, so that no call of this launch begins before they exist.
        # A SparseCore that needs none of them would run during what goes before.
        others = [
            value
            for index, value in enumerate(inputs)
            if index not in sources
            and not isinstance(self._avals[index].memory_space, _jax.CoreMemorySpace)
        ]

        def body(*refs: Any) -> None:
            made = refs[len(sources) + len(others) :]

            @pl.when(lax.axis_index(self._tensor_mesh.axis_name) == 0)
            def _copy() -> None:
                for source, target in zip(refs, targets, strict=False):
                    pltpu.sync_copy(source, made[target])

        out_types = [self._array_type(index) for index in self._shared]
        return self._small_kernel(body, out_types, ALLOCATE)(*sources.values(), *others)

    def _finish(self, shared: Mapping[int, Any], tokens: Sequence[Any]) -> dict[int, Any]:
        values = [shared[self._home(output)] for output in self._copied]

        def body(*refs: Any) -> None:
            targets = refs[len(values) + len(tokens) :]

            @pl.when(lax.axis_index(self._tensor_mesh.axis_name) == 0)
            def _copy() -> None:
                for source, target in zip(refs, targets, strict=False):
                    pltpu.sync_copy(source, target)

        out_types = [self._array_type(self._home(output)) for output in self._copied]
        results = self._small_kernel(body, out_types, FINISH)(*values, *tokens)
        return dict(zip(self._copied, results, strict=True))

    def _small_kernel(self, body: Any, out_types: Sequence[Any], part: str) -> Any:
        return _jax.stock_mpmd_map(
            [(self._tensor_mesh, body)],
            out_types,
            # What is allocated twice must not become one.
            compiler_params=_jax.TpuCompilerParams(has_side_effects=part == ALLOCATE),
            name=f"{self._params['name']}_{part}",
        )

    def _array_type(self, index: int) -> Any:
        aval = self._avals[index]
        space = aval.memory_space
        if not isinstance(space, _jax.CoreMemorySpace):
            space = _jax.TpuMemorySpace.HBM
        return _jax.MemoryRef(aval.inner_aval, space)

    def _call(
        self, group: _Group, inputs: Sequence[Any], shared: Mapping[int, Any]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Runs the programs of one kind.

        Returns the outputs that it writes, by their index, and, if `finish` has to wait for it,
        one more.
        """
        params = self._params
        own_outputs = [
            output
            for output in range(self._num_outputs)
            if output not in self._copied and self._writer(output) is group
        ]
        overwritten = {self._overwritten[o]: o for o in own_outputs if o in self._overwritten}
        operands = [
            index
            for index in range(len(self._avals))
            if (index in shared and index in group.uses)
            or (index < self._num_inputs and index in group.uses - set(shared))
            or index in overwritten
        ]
        first_scratch = self._num_inputs + self._num_outputs
        scratch = [
            index
            for index in range(first_scratch, len(self._avals))
            if index in group.uses and index not in shared
        ]
        tokens = [_TOKEN] if self._copied else []
        variables = [
            *operands,
            *[self._num_inputs + output for output in own_outputs],
            *[_jax.AbstractRef(token, memory_space=_jax.TpuMemorySpace.HBM) for token in tokens],
            *scratch,
        ]
        values = []
        external: list[Any] = []
        for index in operands:
            value = shared[index] if index in shared else inputs[index]
            space = self._avals[index].memory_space
            if index in shared and not isinstance(space, _jax.CoreMemorySpace):
                # XLA would give a call a copy in faster memory of an array that is small.
                value = _jax.with_memory_space_constraint(value, _jax.TpuMemorySpace.HBM)
            if isinstance(space, _jax.CoreMemorySpace):
                value = _jax.with_memory_space_constraint(value, space)
                if space.mesh not in (*group.meshes, *external):
                    external.append(space.mesh)
            values.append(value)
        results = stock.bind(
            *values,
            jaxprs=tuple(_with_variables(jaxpr, variables) for jaxpr in group.jaxprs),
            meshes=group.meshes,
            external_meshes=tuple(external),
            out_avals=(*[params["out_avals"][output] for output in own_outputs], *tokens),
            input_output_aliases=_jax.FrozenDict(
                {operands.index(i): own_outputs.index(o) for i, o in overwritten.items()}
            ),
            compiler_params=params["compiler_params"].replace(has_side_effects=True),
            interpret=False,
            debug=params["debug"],
            cost_estimate=params["cost_estimate"],
            name=f"{params['name']}_{group.part}",
            metadata=params["metadata"],
        )
        outputs = dict(zip(own_outputs, results, strict=False))
        return outputs, list(results[len(own_outputs) :])

    def _writer(self, output: int) -> _Group:
        """Returns the programs that an output belongs to, where they are of one kind."""
        return self._sparse if self._home(output) in self._sparse.uses else self._tensor


def _first_uses(jaxpr: Any) -> dict[Any, Any]:
    """Returns the variables that a program is given and uses, each with its first equation."""
    uses: dict[Any, Any] = {}
    given = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if isinstance(atom, _jax.Var) and atom in given:
                uses.setdefault(atom, eqn)
    return uses


def _name(jaxpr: Any, var: Any) -> str:
    names = jaxpr.debug_info.arg_names
    return names[jaxpr.invars.index(var)] if names else "a Ref"


def _renamed(jaxpr: Any, same: Mapping[int, int]) -> Any:
    """Returns the jaxpr with some variables, given by number, replaced by others."""
    if not same:
        return jaxpr
    new = {jaxpr.invars[old]: jaxpr.invars[index] for old, index in same.items()}
    return jaxpr.replace(
        eqns=[
            eqn.replace(
                invars=[new.get(a, a) if isinstance(a, _jax.Var) else a for a in eqn.invars],
                effects=_renamed_effects(eqn.effects, new),
            )
            for eqn in jaxpr.eqns
        ],
        effects=_renamed_effects(jaxpr.effects, new),
    )


def _renamed_effects(effects: Any, new: Mapping[Any, Any]) -> set[Any]:
    return {
        effect.replace(new[effect.input])
        if isinstance(effect, _jax.JaxprInputEffect) and effect.input in new
        else effect
        for effect in effects
    }


def _with_variables(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """Returns the jaxpr with these of its variables, by number, or new ones, by type."""
    old_names = jaxpr.debug_info.arg_names
    invars, names = [], []
    for variable in variables:
        is_old = isinstance(variable, int)
        invars.append(jaxpr.invars[variable] if is_old else _jax.Var(variable))
        names.append(old_names[variable] if is_old and old_names else "")
    # An equation's effect on a variable that is not there any more has nothing to name.
    effects = {
        effect
        for effect in jaxpr.effects
        if not isinstance(effect, _jax.JaxprInputEffect) or effect.input in invars
    }
    info = jaxpr.debug_info._replace(arg_names=tuple(names))
    return jaxpr.replace(invars=invars, effects=effects, debug_info=info)
