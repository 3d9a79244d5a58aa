"""Mixture of experts: tokens go to the experts they chose, and what those return comes back.

Dispatch scatters each token's row into the buffers of its experts. Combine gathers a row from each
of them and adds these up by weight. Both run on all vector subcores; between them XLA multiplies
matrices on the TensorCore. Choices that an expert has no room for are dropped.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit(static_argnames="capacity")
def run(tokens, choices, weights, experts, capacity=256):
    """Returns float32[T, W]: each token by its chosen experts, added up by weight.

    tokens is float32[T, W], choices int32[K, T], weights float32[K, T] and experts
    float32[E, W, W]. T is 8, 16, ... or 128 times the number of subcores, and W a multiple of 128.
    Each expert takes the first `capacity` choices of it.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    num_tokens, width = tokens.shape
    num_choices, num_experts = len(choices), len(experts)
    share = num_tokens // mesh.size

    # The place of a choice in its expert's buffer is how many chose that expert before.
    chosen = jax.nn.one_hot(choices.reshape(-1), num_experts, dtype=jnp.int32)
    place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(axis=1)
    slots = jnp.where(place < capacity, choices.reshape(-1) * capacity + place, -1)
    weights = jnp.where(slots < 0, 0, weights.reshape(-1))

    my_slots = pltpu.VMEM((num_choices, share), jnp.int32)
    my_rows = pltpu.VMEM((share, width), jnp.float32)

    def mine(choice=0):
        subcore = lax.axis_index("core") * mesh.num_subcores + lax.axis_index("subcore")
        return pl.ds(choice * num_tokens + subcore * share, share)

    buffers = jax.ShapeDtypeStruct((num_experts * capacity, width), jnp.float32)

    @pl.kernel(out_type=buffers, mesh=mesh, scratch_types=[my_slots, my_rows])
    def dispatch(tokens_ref, slots_ref, buffers_ref, slots, rows):
        pltpu.sync_copy(tokens_ref.at[mine()], rows)
        for choice in range(num_choices):
            pltpu.sync_copy(slots_ref.at[mine(choice)], slots.at[choice])
            # Row i goes to row slots[i]; where that is -1, it goes nowhere.
            taken = plsc.Indices(slots.at[choice], ignored_value=-1)
            pltpu.sync_copy(rows, buffers_ref.at[taken])

    my_weights = pltpu.VMEM((share,), jnp.float32)

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        scratch_types=[my_slots, my_weights, my_rows, my_rows],
    )
    def combine(buffers_ref, slots_ref, weights_ref, out_ref, slots, weights, rows, sums):
        def add(choice):
            pltpu.sync_copy(slots_ref.at[mine(choice)], slots.at[choice])
            pltpu.sync_copy(weights_ref.at[mine(choice)], weights)
            taken = plsc.Indices(slots.at[choice], ignored_value=-1)
            pltpu.sync_copy(buffers_ref.at[taken], rows)

            @pl.loop(0, share)
            def _(token):
                weight = plsc.load_gather(weights, [jnp.full((lanes,), token, jnp.int32)])

                @pl.loop(0, width, step=lanes)
                def _(column):
                    strip = pl.ds(column, lanes)
                    # A row that was not gathered holds anything, even NaN.
                    scaled = jnp.where(weight == 0, 0.0, weight * rows[token, strip])
                    sums[token, strip] = scaled if choice == 0 else sums[token, strip] + scaled

        for choice in range(num_choices):
            add(choice)
        pltpu.sync_copy(sums, out_ref.at[mine()])

    sent = dispatch(tokens, slots).reshape(num_experts, capacity, width)
    returned = jnp.einsum("ecw,ewv->ecv", sent, experts)
    return combine(returned.reshape(-1, width), slots, weights)


def inputs(random, size):
    """Random arguments for `run`: 512 tokens for each unit of `size`, 2 of 8 experts each."""
    num_tokens = 512 * size
    return (
        random.standard_normal((num_tokens, 128), np.float32),
        random.integers(0, 8, (2, num_tokens), np.int32),
        random.random((2, num_tokens), np.float32),
        random.standard_normal((8, 128, 128), np.float32),
    )


def expected(tokens, choices, weights, experts, capacity=256):
    """What `run` returns, by NumPy."""
    result, room = np.zeros(tokens.shape), np.full(len(experts), capacity)
    for chosen, chosen_weights in zip(choices, weights, strict=True):
        for token, (expert, weight) in enumerate(zip(chosen, chosen_weights, strict=True)):
            if room[expert] > 0:
                room[expert] -= 1
                result[token] += weight * (tokens[token] @ experts[expert])
    return result


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_allclose(run(*arguments), expected(*arguments), rtol=1e-3, atol=1e-3)
    print("every token came back")
