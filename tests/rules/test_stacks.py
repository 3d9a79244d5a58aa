"""Random small kernels under random stacks of transformations equal the same mathematics."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """The kernel and the mathematics of `a * x * y + b * x`, done in one of several ways.

    Attributes:
      cores: how many cores share the work, each `window` elements of it.
      through_dma: whether the cores copy their windows to private memory first.
      second_program: whether the last term is added by another program, which waits for the first.
      in_place: whether the result comes out of a Ref that the kernel updates.
      closed_over: whether `b` is a scalar that the program closes over.
      on_tpu_meshes: whether the programs are one of vector subcores and one of a TensorCore, whose
        data moves by DMA only.
    """

    cores: int
    window: int
    a: float
    b: float
    through_dma: bool
    second_program: bool
    in_place: bool
    closed_over: bool
    on_tpu_meshes: bool

    @property
    def shape(self):
        return (self.cores * self.window,)

    def mathematics(self, x, y):
        return self.a * x * y + self.b * x

    def meshes(self):
        """Returns the meshes of both programs and the axes that tell their cores apart."""
        if not self.on_tpu_meshes:
            return cokernel.CoreMesh(core=self.cores), "core", cokernel.CoreMesh(lane=1), "lane"
        subcores = plsc.VectorSubcoreMesh(
            core_axis_name="sparse", subcore_axis_name="core", num_cores=1, num_subcores=self.cores
        )
        return subcores, "core", pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1), "tensor"

    def kernel(self, x, y):
        with cokernel.target("v6e") if self.on_tpu_meshes else contextlib.nullcontext():
            return self.run(x, y)

    def run(self, x, y):
        cores, core_axis, other, other_axis = self.meshes()
        through_dma = self.through_dma or self.on_tpu_meshes
        # Where it is closed over, it is traced, and may be batched or have a tangent.
        b = self.b + 0.0 * x[0] if self.closed_over else self.b

        def multiply(x_ref, y_ref, o_ref, x_buffer, y_buffer, all_buffer, sum_buffer, done):
            window = pl.ds(self.window * lax.axis_index(core_axis), self.window)
            if through_dma:
                pltpu.sync_copy(x_ref.at[window], x_buffer)
                pltpu.sync_copy(y_ref.at[window], y_buffer)
                y_buffer[...] = self.a * x_buffer[...] * y_buffer[...]
                if not self.second_program:
                    y_buffer[...] += x_buffer[...] * b
                pltpu.sync_copy(y_buffer, o_ref.at[window])
            else:
                o_ref[window] = self.a * x_ref[window] * y_ref[window]
                if not self.second_program:
                    o_ref[window] += x_ref[window] * b
            if self.second_program:
                pl.semaphore_signal(done, 1, device_id={other_axis: 0})

        def add(x_ref, y_ref, o_ref, x_buffer, y_buffer, all_buffer, sum_buffer, done):
            pl.semaphore_wait(done, self.cores)
            if through_dma:
                pltpu.sync_copy(x_ref, all_buffer)
                pltpu.sync_copy(o_ref, sum_buffer)
                sum_buffer[...] += all_buffer[...] * b
                pltpu.sync_copy(sum_buffer, o_ref)
            else:
                o_ref[...] += x_ref[...] * b

        programs = [(cores, multiply)]
        if self.second_program:
            programs.append((other, add))
        last = programs[-1][0]
        out_type = jax.ShapeDtypeStruct(self.shape, F32)
        run = cokernel.mpmd_map(
            programs,
            () if self.in_place else out_type,
            scratch_types=[
                cokernel.private((self.window,), F32) @ cores,
                cokernel.private((self.window,), F32) @ cores,
                cokernel.private(self.shape, F32) @ last,
                cokernel.private(self.shape, F32) @ last,
                pltpu.SemaphoreType.REGULAR @ last,
            ],
        )
        if not self.in_place:
            return run(x, y)
        result = jax.new_ref(jnp.zeros_like(x))
        run(x, y, result)
        return result[...]


def batch(fn):
    def batched(x, y):
        first = jax.vmap(fn)(jnp.stack([x, y, x + y]), jnp.stack([y, x, x]))
        second = jax.vmap(fn, in_axes=(1, None), out_axes=1)(jnp.stack([x, y], 1), y)
        return first.sum(0) + second.sum(1)

    return batched


def differentiate(fn):
    def derivative(x, y):
        out, tangent = jax.jvp(fn, (x, y), (y, 0.5 * x))
        return out + tangent

    return derivative


def linearize(fn):
    def derivative(x, y):
        out, pushforward = jax.linearize(fn, x, y)
        return out + pushforward(y, 0.5 * x)

    return derivative


def repeat(fn):
    def repeated(x, y):
        return lax.scan(lambda carry, z: (fn(0.1 * carry, z), None), x, jnp.stack([y, x]))[0]

    return repeated


def choose(fn):
    def chosen(x, y):
        return lax.cond(x[0] > y[0], fn, lambda x, y: fn(y, x), x, y)

    return chosen


def loop(fn):
    def looped(x, y):
        return lax.fori_loop(0, 2, lambda i, carry: fn(0.1 * carry, y) + i, x)

    return looped


def spread(fn):
    """Runs the function on two devices, one with exchanged arguments, and adds their results."""
    mesh = jax.make_mesh((2,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("device")

    # A Ref that is made inside varies over the devices, which the check does not allow; and JAX
    # linearises one inside only under jit.
    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    def on_each(x, y):
        return fn(x[0], y[0])[None]

    return lambda x, y: on_each(jnp.stack([x, y]), jnp.stack([y, x])).sum(0)


TRANSFORMATIONS = [
    jax.jit,
    jax.checkpoint,
    batch,
    differentiate,
    linearize,
    repeat,
    choose,
    loop,
    spread,
]

polynomials = st.builds(
    Polynomial,
    cores=st.integers(1, 3),
    window=st.integers(1, 3),
    a=st.sampled_from([1.0, -0.5]),
    b=st.sampled_from([0.0, 2.0]),
    through_dma=st.booleans(),
    second_program=st.booleans(),
    in_place=st.booleans(),
    closed_over=st.booleans(),
    on_tpu_meshes=st.booleans(),
)


@settings(max_examples=30)
@given(polynomials, st.lists(st.sampled_from(TRANSFORMATIONS), max_size=3), st.integers(0, 99))
def test_any_stack_of_transformations(polynomial, stack, seed):
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.normal(size=polynomial.shape), F32) for _ in range(2))
    if polynomial.in_place and linearize in stack:
        # JAX itself splits no Ref between the two passes of a linearised scan or checkpoint.
        inner = stack[: len(stack) - 1 - stack[::-1].index(linearize)]
        assume(not {repeat, loop, jax.checkpoint}.intersection(inner))
    # A shard_map inside of another needs another mesh.
    assume(stack.count(spread) <= 1)
    fn, reference = polynomial.kernel, polynomial.mathematics
    for transform in stack:
        fn, reference = transform(fn), transform(reference)
    np.testing.assert_allclose(fn(x, y), reference(x, y), rtol=2e-4, atol=2e-4)
