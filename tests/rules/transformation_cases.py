"""What users compose around a kernel, each as a case that Cokernel and JAX's own kernels can run.

A case returns if the result is right, fails an assertion if it is wrong, and lets any other
exception out. `test_transformation_cases.py` runs all of them with Cokernel, and
`scripts/transformations.py` runs them with both and writes the table in `docs/transformations.md`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)
MESH = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)


@dataclasses.dataclass(frozen=True)
class Api:
    """One implementation of kernels.

    Attributes:
      kernel: `cokernel.kernel`, or `pl.kernel` with an interpreter.
      copies: whether bodies copy between device memory and private memory, as an interpreter that
        models the hardware demands, or use device memory directly.
    """

    kernel: Callable[..., Any]
    copies: bool

    def elementwise(self, fn: Callable[..., Any], num_inputs: int, **options: Any) -> Any:
        """Returns a kernel that applies `fn` to vectors of four, half of them on each core."""

        def direct(*refs: Any) -> None:
            half = pl.ds(2 * lax.axis_index("core"), 2)
            refs[-1][half] = fn(*(ref[half] for ref in refs[:-1]))

        def copying(*refs: Any) -> None:
            *device, output = refs[: num_inputs + 1]
            *private, result = refs[num_inputs + 1 :]
            half = pl.ds(2 * lax.axis_index("core"), 2)
            for source, destination in zip(device, private, strict=True):
                pltpu.sync_copy(source.at[half], destination)
            result[...] = fn(*(ref[...] for ref in private))
            pltpu.sync_copy(result, output.at[half])

        scratch = [pltpu.VMEM((2,), F32)] * (num_inputs + 1) if self.copies else ()
        body = copying if self.copies else direct
        return self.kernel(body, VECTOR4, mesh=MESH, scratch_types=scratch, **options)

    def double(self, **options: Any) -> Any:
        """Returns a kernel that doubles a vector of four."""
        return self.elementwise(lambda x: 2.0 * x, 1, **options)

    def update(self, fn: Callable[[Any, Any], Any]) -> Any:
        """Returns a kernel that replaces the Ref `r` by `fn(r, x)`, for arguments x and r."""

        def direct(x_ref: Any, r_ref: Any) -> None:
            half = pl.ds(2 * lax.axis_index("core"), 2)
            r_ref[half] = fn(r_ref[half], x_ref[half])

        def copying(x_ref: Any, r_ref: Any, x: Any, r: Any) -> None:
            half = pl.ds(2 * lax.axis_index("core"), 2)
            pltpu.sync_copy(x_ref.at[half], x)
            pltpu.sync_copy(r_ref.at[half], r)
            r[...] = fn(r[...], x[...])
            pltpu.sync_copy(r, r_ref.at[half])

        scratch = [pltpu.VMEM((2,), F32)] * 2 if self.copies else ()
        return self.kernel(copying if self.copies else direct, mesh=MESH, scratch_types=scratch)


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, the part of the table it belongs to, and what it tries."""

    part: str
    title: str
    run: Callable[[Api], None]


CASES: list[Case] = []


def case(part: str, title: str) -> Callable[[Callable[[Api], None]], Callable[[Api], None]]:
    """Adds a function to the cases."""

    def add(run: Callable[[Api], None]) -> Callable[[Api], None]:
        CASES.append(Case(part, title, run))
        return run

    return add


def vector() -> Any:
    """Returns the vector that most cases work on."""
    return jnp.arange(1.0, 5.0, dtype=F32)


def check(got: Any, wanted: Any) -> None:
    """Fails unless two trees of arrays are nearly equal."""
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class VagueError(AssertionError):
    """Something is refused as it should be, but the message does not say what would help."""


def check_refused(words: str, fn: Callable[[], Any]) -> None:
    """Fails unless `fn` raises an error whose message contains `words`."""
    message = None
    try:
        fn()
    except Exception as error:
        message = str(error)
    assert message is not None, "it is accepted"
    if words.lower() not in message.lower():
        raise VagueError(message)


@case("evaluation", "eager call")
def _(api: Api) -> None:
    check(api.double()(vector()), 2.0 * vector())


@case("evaluation", "eager call while `jax_disable_jit` is set")
def _(api: Api) -> None:
    with jax.disable_jit():
        check(api.double()(vector()), 2.0 * vector())


@case("evaluation", "second eager call traces nothing")
def _(api: Api) -> None:
    count = []
    kernel = api.elementwise(lambda x: (count.append(1), 2.0 * x)[1], 1)
    for _ in range(3):
        kernel(vector())
    assert len(count) == 1, f"the body was traced {len(count)} times"


@case("evaluation", "in jit, twice in one function")
def _(api: Api) -> None:
    double = api.double()
    check(jax.jit(lambda x: double(double(x) + 1.0))(vector()), 4.0 * vector() + 2.0)


@case("evaluation", "in scan")
def _(api: Api) -> None:
    double = api.double()
    out, _ = jax.jit(lambda x: lax.scan(lambda c, _: (double(c), None), x, None, 3))(vector())
    check(out, 8.0 * vector())


@case("abstract evaluation and effects", "a write to a Ref is an effect; a pure kernel has none")
def _(api: Api) -> None:
    update = api.update(lambda r, x: r + x)
    with_ref = jax.make_jaxpr(lambda x, ref: update(x, ref))(vector(), jax.new_ref(vector()))
    assert any("Write" in type(effect).__name__ for effect in with_ref.effects), "it has no effect"
    pure = jax.make_jaxpr(api.double())(vector())
    assert not pure.effects, f"a pure kernel has the effects {pure.effects}"


@case("sharding", "a sharded argument is refused, naming the axis types")
def _(api: Api) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(vector(), sharding)
    check_refused("axis types", lambda: api.double()(x))


@case("programs", "two programs that share a semaphore")
def _(api: Api) -> None:
    import cokernel

    with cokernel.target("v6e"):
        from jax.experimental.pallas import tpu_sc as plsc

        scalar = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)
        vectors = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )

    def produce(x_ref: Any, o_ref: Any, ready: Any) -> None:
        pltpu.sync_copy(x_ref, o_ref)
        pl.semaphore_signal(ready, 1, device_id={"core": 0, "subcore": 0})

    def consume(x_ref: Any, o_ref: Any, ready: Any) -> None:
        pl.semaphore_wait(ready, 1)

    with cokernel.target("v6e"):
        kernel = api.kernel(
            [produce, consume],
            VECTOR4,
            mesh=[scalar, vectors],
            scratch_types=[pltpu.SemaphoreType.REGULAR @ vectors],
        )
        check(kernel(vector()), vector())


@case("Refs in and out", "a Ref argument is written, eagerly")
def _(api: Api) -> None:
    ref = jax.new_ref(vector())
    api.update(lambda r, x: r + x)(vector(), ref)
    check(ref[...], 2.0 * vector())


@case("Refs in and out", "part of a Ref as argument, `ref.at[4:8]`")
def _(api: Api) -> None:
    ref = jax.new_ref(jnp.arange(12.0))
    check(api.double()(ref.at[4:8]), 2.0 * jnp.arange(4.0, 8.0))


@case("Refs in and out", "a Ref that the body closes over")
def _(api: Api) -> None:
    ref = jax.new_ref(jnp.zeros(4))

    def body(x_ref: Any, *scratch: Any) -> None:
        half = pl.ds(2 * lax.axis_index("core"), 2)
        if api.copies:
            pltpu.sync_copy(x_ref.at[half], scratch[0])
            pltpu.sync_copy(scratch[0], ref.at[half])
        else:
            ref[half] = x_ref[half]

    scratch = [pltpu.VMEM((2,), F32)] if api.copies else ()
    api.kernel(body, mesh=MESH, scratch_types=scratch)(vector())
    check(ref[...], vector())


@case("Refs in and out", "a traced scalar that the body closes over")
def _(api: Api) -> None:
    @jax.jit
    def fn(x: Any, factor: Any) -> Any:
        return api.elementwise(lambda x: factor * x, 1)(x)

    check(fn(vector(), 3.0), 3.0 * vector())


@case("Refs in and out", "an array that the body closes over is refused by name")
def _(api: Api) -> None:
    table = jnp.ones(2)
    kernel = api.elementwise(lambda x: x + table, 1)
    check_refused("table", lambda: jax.jit(kernel)(vector()))


@case("Refs in and out", "the same Ref twice is refused, naming both parameters")
def _(api: Api) -> None:
    ref = jax.new_ref(jnp.ones(4))
    kernel = api.kernel(lambda first_ref, second_ref: None, mesh=MESH)
    check_refused("second_ref", lambda: kernel(ref, ref))


@case("discharge", "a Ref inside jit")
def _(api: Api) -> None:
    add = api.update(lambda r, x: r + x)

    @jax.jit
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        add(x, ref)
        add(x, ref)
        return ref[...]

    check(fn(vector()), 3.0 * vector())


@case("discharge", "a Ref inside scan")
def _(api: Api) -> None:
    add = api.update(lambda r, x: r + x)

    @jax.jit
    def fn(xs: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(4))

        def step(carry: Any, x: Any) -> Any:
            add(x, ref)
            return carry, None

        lax.scan(step, None, xs)
        return ref[...]

    xs = jnp.arange(12.0).reshape(3, 4)
    check(fn(xs), xs.sum(0))


@case("discharge", "a Ref inside cond")
def _(api: Api) -> None:
    add = api.update(lambda r, x: r + x)

    @jax.jit
    def fn(condition: Any, x: Any) -> Any:
        ref = jax.new_ref(x)
        lax.cond(condition, lambda: add(x, ref), lambda: ())
        return ref[...]

    check((fn(True, vector()), fn(False, vector())), (2.0 * vector(), vector()))


@case("DCE", "a pure kernel whose outputs are unused is dropped")
def _(api: Api) -> None:
    def names(fn: Callable[..., Any]) -> set[str]:
        compiled = jax.jit(fn).lower(vector()).compile().as_text()
        return {name for name in ("custom-call", "while", "fusion") if name in compiled}

    double = api.double()
    assert names(lambda x: (double(x), x)[1]) == set(), "it is kept"


@case("DCE", "a kernel that writes to a Ref is kept")
def _(api: Api) -> None:
    add = api.update(lambda r, x: r + x)
    ref = jax.new_ref(vector())
    jax.jit(lambda x: (add(x, ref), 0)[1])(vector())
    check(ref[...], 2.0 * vector())


def _square(api: Api) -> Any:
    double = api.double()
    multiply = api.elementwise(lambda x, y: x * y, 2)

    @jax.custom_vjp
    def square(x: Any) -> Any:
        return multiply(x, x)

    square.defvjp(lambda x: (multiply(x, x), x), lambda x, g: (multiply(double(x), g),))
    return square


@case("remat", "gradient of a custom_vjp under `jax.checkpoint`, every policy")
def _(api: Api) -> None:
    square = _square(api)
    for policy in (
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_saveable,
    ):
        loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(square(x))), policy=policy)
        check(jax.jit(jax.grad(loss))(vector()), 2.0 * vector() * jnp.cos(vector() ** 2))


@case("remat", "with a Ref that the kernel updates")
def _(api: Api) -> None:
    multiply = api.update(lambda r, x: r * x)

    @jax.custom_vjp
    def square(x: Any) -> Any:
        ref = jax.new_ref(x)
        multiply(x, ref)
        return ref[...]

    square.defvjp(lambda x: (square(x), x), lambda x, g: (2.0 * x * g,))
    loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(square(x))))
    check(jax.jit(jax.grad(loss))(vector()), 2.0 * vector() * jnp.cos(vector() ** 2))


def _batch(size: int) -> Any:
    return jnp.arange(4.0 * size, dtype=F32).reshape(size, 4)


@case("vmap", "an empty batch")
def _(api: Api) -> None:
    assert jax.vmap(api.double())(_batch(0)).shape == (0, 4)


@case("vmap", "a batch of one")
def _(api: Api) -> None:
    check(jax.vmap(api.double())(_batch(1)), 2.0 * _batch(1))


@case("vmap", "a batch of three")
def _(api: Api) -> None:
    check(jax.jit(jax.vmap(api.double()))(_batch(3)), 2.0 * _batch(3))


@case("vmap", "a batch on the last axis")
def _(api: Api) -> None:
    check(jax.jit(jax.vmap(api.double(), in_axes=1))(_batch(3).T), 2.0 * _batch(3))


@case("vmap", "one of two arguments batched")
def _(api: Api) -> None:
    add = api.elementwise(lambda x, y: x + y, 2)
    batched = jax.jit(jax.vmap(add, in_axes=(0, None)))
    check(batched(_batch(3), vector()), _batch(3) + vector())


@case("vmap", "of vmap")
def _(api: Api) -> None:
    x = jnp.arange(24.0, dtype=F32).reshape(2, 3, 4)
    check(jax.jit(jax.vmap(jax.vmap(api.double())))(x), 2.0 * x)


@case("vmap", "an index that is batched")
def _(api: Api) -> None:
    def body(index_ref: Any, table_ref: Any, o_ref: Any, index: Any, row: Any) -> None:
        pltpu.sync_copy(index_ref, index)
        pltpu.sync_copy(table_ref.at[index[0]], row)
        pltpu.sync_copy(row, o_ref)

    kernel = api.kernel(
        body,
        VECTOR4,
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        scratch_types=[pltpu.SMEM((1,), jnp.int32), pltpu.VMEM((4,), F32)],
    )
    indices = jnp.array([[2], [0]], jnp.int32)
    check(
        jax.jit(jax.vmap(kernel, in_axes=(0, None)))(indices, _batch(3)),
        _batch(3)[jnp.array([2, 0])],
    )


@case("vmap", "a batched Ref is written back")
def _(api: Api) -> None:
    add = api.update(lambda r, x: r + x)

    @jax.jit
    @jax.vmap
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        add(x, ref)
        return ref[...]

    check(fn(_batch(3)), 2.0 * _batch(3))


@case("vmap", "a batched scalar that the body closes over")
def _(api: Api) -> None:
    @jax.jit
    @jax.vmap
    def fn(x: Any, factor: Any) -> Any:
        return api.elementwise(lambda x: factor * x, 1)(x)

    check(fn(_batch(3), vector()[:3]), vector()[:3, None] * _batch(3))


@case("vmap", "of the gradient of a custom_vjp")
def _(api: Api) -> None:
    square = _square(api)
    gradient = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(square(x)))))
    check(gradient(_batch(3)), 2.0 * _batch(3))


@case("forward mode", "`jax.jvp`")
def _(api: Api) -> None:
    cube = api.elementwise(lambda x: x * x * x, 1)
    x = vector()
    check(jax.jit(lambda x: jax.jvp(cube, (x,), (x,)))(x), (x**3, 3.0 * x**3))


@case("forward mode", "`jax.linearize`")
def _(api: Api) -> None:
    cube = api.elementwise(lambda x: x * x * x, 1)
    _, pushforward = jax.linearize(cube, vector())
    check(pushforward(jnp.ones(4)), 3.0 * vector() ** 2)


@case("forward mode", "`jax.jacfwd`")
def _(api: Api) -> None:
    cube = api.elementwise(lambda x: x * x * x, 1)
    check(jax.jacfwd(cube)(vector()), jnp.diag(3.0 * vector() ** 2))


@case("forward mode", "`jax.grad` without a rule is refused and names custom_vjp")
def _(api: Api) -> None:
    double = api.double()
    check_refused("custom_vjp", lambda: jax.grad(lambda x: jnp.sum(double(x)))(vector()))


@case("forward mode", "an operation without a derivative is refused, naming its line")
def _(api: Api) -> None:
    bits = api.elementwise(lambda x: pltpu.bitcast(x, jnp.int32, dim=-1).astype(F32), 1)
    check_refused("transformation_cases.py:", lambda: jax.jvp(bits, (vector(),), (vector(),)))


@dataclasses.dataclass(frozen=True)
class PairType(hijax.HiType):
    """The type of two vectors of four."""

    def lo_ty(self) -> list[Any]:
        return [jax.typeof(jnp.zeros(4))] * 2

    def lower_val(self, pair: Any) -> list[Any]:
        return [pair.first, pair.second]

    def raise_val(self, first: Any, second: Any) -> Any:
        return Pair(first, second)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two vectors of four, which is one value to JAX."""

    first: Any
    second: Any


hijax.register_hitype(Pair, lambda pair: PairType())


@case("hijax", "a value of two arrays as argument and output")
def _(api: Api) -> None:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    result = jax.jit(api.kernel(body, PairType(), mesh=MESH))(Pair(vector(), 2.0 * vector()))
    check((result.first, result.second), (vector(), 2.0 * vector()))


@case("names, metadata, debug", "metadata reaches the lowered module")
def _(api: Api) -> None:
    text = jax.jit(api.double(metadata={"purpose": "testing"})).lower(vector()).as_text()
    assert "purpose" in text, "it is not there"


@case("names, metadata, debug", "cost_estimate reaches the compiled module")
def _(api: Api) -> None:
    cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=32)
    compiled = jax.jit(api.double(cost_estimate=cost)).lower(vector()).compile()
    assert "12345" in compiled.as_text(), "it is not there"


@case("validation", "no program at all is refused")
def _(api: Api) -> None:
    check_refused("at least one", lambda: api.kernel([], VECTOR4, mesh=[])(vector()))


@case("validation", "a wrong number of arguments: both counts and the program are named")
def _(api: Api) -> None:
    def program_body(x_ref: Any, o_ref: Any) -> None:
        pass

    kernel = api.kernel(program_body, VECTOR4, mesh=MESH)
    check_refused("program_body", lambda: kernel(vector(), vector()))


@case("validation", "a body that returns something is refused and named")
def _(api: Api) -> None:
    def program_body(x_ref: Any, o_ref: Any) -> Any:
        return 1.0

    kernel = api.kernel(program_body, VECTOR4, mesh=MESH)
    check_refused("program_body", lambda: kernel(vector()))


@case("validation", "an unknown type of output is refused, naming its place")
def _(api: Api) -> None:
    check_refused(
        "out_types[1]",
        lambda: api.kernel(lambda *refs: None, [VECTOR4, "float32"], mesh=MESH)(vector()),
    )


@case("validation", "zero-sized arrays")
def _(api: Api) -> None:
    out_type = jax.ShapeDtypeStruct((0, 4), F32)
    kernel = api.kernel(lambda x_ref, o_ref: None, out_type, mesh=MESH)
    assert kernel(jnp.zeros((0, 4))).shape == (0, 4)


@case("several platforms", "lowering for two at once is refused")
def _(api: Api) -> None:
    traced = jax.jit(api.double()).trace(vector())
    check_refused("platform", lambda: traced.lower(lowering_platforms=("cpu", "tpu")))


def _sharded(api: Api, check_vma: bool) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    double = api.double()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    def fn(x: Any) -> Any:
        return double(x) + lax.axis_index("x").astype(F32)

    x = jnp.arange(16.0)
    check(fn(x), 2.0 * x + jnp.repeat(jnp.arange(4.0), 4))


@case("shard_map, export", "shard_map over four devices, check_vma off")
def _(api: Api) -> None:
    _sharded(api, False)


@case("shard_map, export", "shard_map over four devices, check_vma on")
def _(api: Api) -> None:
    _sharded(api, True)


@case("shard_map, export", "exported, serialised and called")
def _(api: Api) -> None:
    exported = jax.export.export(
        jax.jit(api.double()),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cokernel_launch")],
    )(vector())
    again = jax.export.deserialize(bytearray(exported.serialize()))
    check(again.call(vector()), 2.0 * vector())
