"""What is wrong with a program is said in the same words whoever traces it, JAX or Cokernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

OUT = jax.ShapeDtypeStruct((8,), jnp.float32)
X = np.arange(8, dtype=np.float32)


@pytest.fixture(params=["stock", "own"])
def make(request):
    """Makes a kernel of a body on two cores of an axis "core"."""
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
    with cokernel.pallas.enabled():
        make = pl.kernel if request.param == "stock" else cokernel.kernel
        yield lambda body, **rest: make(body, OUT, mesh=mesh, **rest)


@pytest.fixture(autouse=True)
def still_works():
    """After the error of a test, the next kernel runs."""
    yield
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

    def double(x_ref, out_ref):
        @pl.when(lax.axis_index("core") == 0)
        def _write():
            out_ref[...] = x_ref[...] * 2

    with cokernel.pallas.enabled():
        np.testing.assert_array_equal(pl.kernel(double, OUT, mesh=mesh)(X), X * 2)


def test_an_index_on_an_axis_that_there_is_not(make):
    def lost(x_ref, out_ref):
        out_ref[...] = x_ref[...] * lax.axis_index("row")

    with pytest.raises(NameError, match=r"lost.* uses an axis that it does not have.*'core'.*row"):
        make(lost)(X)


def test_a_device_id_on_an_axis_that_there_is_not(make):
    def lost(x_ref, out_ref, ready):
        pl.semaphore_signal(ready, 1, device_id={"row": 0})

    with pytest.raises(ValueError, match=r"program lost.* names the axis 'row' at .*only .*'core'"):
        make(lost, scratch_types=[pltpu.SemaphoreType.REGULAR])(X)


@pytest.mark.parametrize("make", ["stock"], indirect=True)
def test_a_position_in_a_grid_outside_of_a_pipeline(make):
    def gridless(x_ref, out_ref):
        out_ref[...] = x_ref[...] * pl.program_id(0)

    with pytest.raises(ValueError, match=r"program 'gridless' asks for pl.program_id.*axis_index"):
        make(gridless)(X)


@pytest.mark.parametrize("make", ["stock"], indirect=True)
def test_an_assertion_of_the_user_is_left_alone(make):
    def careful(x_ref, out_ref):
        assert x_ref.shape == (9,), "nine are needed"

    with pytest.raises(AssertionError, match="nine are needed"):
        make(careful)(X)


def test_of_several_stock_programs_each_is_named_with_its_axes():
    with cokernel.target("tpu7x"), cokernel.pallas.enabled():
        scalars = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)
        vectors = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=2
        )

        def rest(x_ref, out_ref):
            pass

        def lost(x_ref, out_ref):
            lax.axis_index("lane")

        kernel = pl.kernel([rest, lost], OUT, mesh=[scalars, vectors])
        with pytest.raises(
            NameError, match=r"'rest', 'lost' .*; 'lost' runs on .*'subcore': .*lan"
        ):
            kernel(X)


@pytest.mark.parametrize("make", ["stock"], indirect=True)
def test_a_kernel_inside_a_kernel_is_told_with_the_line_of_the_user(make):
    def inner(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def outer(x_ref, out_ref):
        out_ref[...] = make(inner)(x_ref[...])

    with pytest.warns(UserWarning, match=r"test_trace_errors.py.*'mpmd_map' has no rule"):
        make(outer)(X)


def test_a_slice_that_is_known_to_leave_its_ref(make):
    def beyond(x_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(2, 8)]

    message = (
        r"program '?beyond.* asks for 8 elements from 2 of dimension 0 of 'x_ref' of shape \(8,\) "
        rf"at {__file__}:\d+, but valid are 0 to 7"
    )
    with pytest.raises(ValueError, match=message):
        make(beyond)(X)


def test_a_slice_that_is_known_to_leave_a_part_of_its_ref(make):
    def beyond(x_ref, out_ref, kept):
        part = kept.at[1, pl.ds(0, 4)]
        out_ref[0:2] = kept.at[1].at[pl.ds(2, 3, stride=3)][...]
        out_ref[0:2] = part[pl.ds(3, 2)]

    message = r"asks for 3 elements from 2, 3 apart, of dimension 0 of 'kept' of shape \(8,\)"
    with pytest.raises(ValueError, match=message):
        make(beyond, scratch_types=[pltpu.VMEM((4, 8), jnp.float32)])(X)


def test_a_slice_that_is_known_to_leave_a_view_with_a_name(make):
    def beyond(x_ref, out_ref):
        part = x_ref.at[pl.ds(0, 4)]
        out_ref[0:2] = part[pl.ds(3, 2)]

    with pytest.raises(ValueError, match=r"2 elements from 3 of .* of 'part' of shape \(4,\)"):
        make(beyond)(X)
