"""What memory holds that nobody has written, and what large copies move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

SIZE = 64
# Results of more bytes than this are written past the caches.
LARGE = 3 << 18


def run(body, *operands, size=SIZE, scratch=(), **options):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((size,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=list(scratch),
        interpret=cokernel.Checked(on_finding="warn", **options),
    )
    return np.asarray(jax.jit(kernel)(*operands))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("fill", "word"), [("nan", -1), ("zeros", 0), (0x5A, 0x5A5A5A5A)])
def test_elements_of_a_result_that_nobody_writes_hold_what_was_asked_for(fill, word):
    def body(x_ref, out_ref):
        out_ref[3:7] = x_ref[3:7]
        out_ref[SIZE - 1] = 9

    expected = np.full(SIZE, word, np.int32)
    expected[3:7] = np.arange(3, 7)
    expected[SIZE - 1] = 9
    for _ in range(2):
        result = run(body, jnp.arange(SIZE, dtype=jnp.int32), fill=fill)
        assert result.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_result_that_is_read_before_it_is_written_holds_it_too(is_loop, is_copy):
    def body(x_ref, out_ref, mine):
        out_ref[0:4] = x_ref[0:4]
        if is_copy:
            pltpu.sync_copy(out_ref, mine)
        elif is_loop:

            @pl.loop(0, SIZE)
            def _step(i):
                mine[i] = out_ref[i]

        else:
            mine[...] = out_ref[...]
        out_ref[...] = mine[...]

    mine = pltpu.VMEM((SIZE,), jnp.int32)
    result = run(body, jnp.arange(SIZE, dtype=jnp.int32), scratch=[mine])
    assert result.tolist() == [0, 1, 2, 3, *[-1] * (SIZE - 4)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sum_into_what_nobody_has_written_starts_from_it():
    def body(x_ref, out_ref):
        jax.ref.addupdate(out_ref, pl.ds(0, 8), x_ref[0:8])
        jax.ref.addupdate(out_ref, pl.ds(4, 8), x_ref[0:8])

    result = run(body, jnp.full(SIZE, 10, jnp.int32))
    assert result.tolist() == [*[9] * 4, *[19] * 4, *[9] * 4, *[-1] * (SIZE - 12)]


@pytest.mark.parametrize("start", [0, 1, 5, 16])
@pytest.mark.parametrize("length", [1024, 1025, 100_003])
def test_a_copy_to_a_large_result_moves_every_byte_and_no_other(start, length):
    def body(x_ref, out_ref, mine):
        pltpu.sync_copy(x_ref, out_ref)
        pltpu.sync_copy(x_ref.at[pl.ds(7, length)], mine)
        pltpu.sync_copy(mine, out_ref.at[pl.ds(start, length)])

    x = np.random.default_rng(length).integers(-(2**31), 2**31, LARGE, np.int32)
    expected = x.copy()
    expected[start : start + length] = x[7 : 7 + length]
    mine = pltpu.VMEM((length,), jnp.int32)
    result = run(body, jnp.asarray(x), size=LARGE, scratch=[mine])
    np.testing.assert_array_equal(result, expected)


def test_a_copy_within_a_large_result_may_overlap_what_it_reads():
    def body(x_ref, out_ref):
        pltpu.sync_copy(x_ref, out_ref)
        pltpu.sync_copy(out_ref.at[pl.ds(0, 8192)], out_ref.at[pl.ds(24, 8192)])

    x = np.arange(LARGE, dtype=np.int32)
    expected = x.copy()
    expected[24 : 24 + 8192] = x[:8192]
    result = run(body, jnp.asarray(x), size=LARGE)
    np.testing.assert_array_equal(result, expected)
