"""Kernels that a chip has no room for, or no register."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

X = jnp.arange(64, dtype=jnp.float32)
OUT = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32)


def subcores(body, *scratch):
    kernel = cokernel.kernel(
        body,
        OUT,
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        scratch_types=scratch,
    )
    return lambda: kernel(X)


def place():
    return lax.axis_index("core"), lax.axis_index("subcore")


@case("ChipLimit", "vmem", chip="tpu7x", chip_limits="error", always=True)
def window_larger_than_a_subcore_s_memory(broken):
    size = 1 << 17 if broken else 1 << 12

    def body(x_ref, out_ref, row):
        def scope(window):
            window[pl.ds(0, 16)] = row[...]
            pltpu.sync_copy(window.at[pl.ds(0, 16)], out_ref.at[place()])

        pltpu.sync_copy(x_ref.at[pl.ds(0, 16)], row)
        pl.run_scoped(scope, pltpu.VMEM((size,), jnp.float32))  # fault

    return subcores(body, pltpu.VMEM((16,), jnp.float32))


@case("ChipLimit", "register", chip="tpu7x", chip_limits="error", always=True)
def value_wider_than_a_register(broken):
    def body(x_ref, out_ref, window):
        pltpu.sync_copy(x_ref, window)
        if broken:
            window[...] = window[...] + 1  # fault
        else:
            for start in range(0, 64, 16):
                window[pl.ds(start, 16)] = window[pl.ds(start, 16)] + 1
        pltpu.sync_copy(window.at[pl.ds(0, 16)], out_ref.at[place()])

    return subcores(body, pltpu.VMEM((64,), jnp.float32))


@case("ChipLimit", "DMA", chip="tpu7x", chip_limits="error", always=True)
def copy_that_begins_within_a_granule(broken):
    def body(x_ref, out_ref, row):
        pltpu.sync_copy(x_ref.at[pl.ds(4 if broken else 8, 16)], row)  # fault
        pltpu.sync_copy(row, out_ref.at[place()])

    return subcores(body, pltpu.VMEM((16,), jnp.float32))


@case("ChipLimit", "vmem", chip="tpu7x", chip_limits="error", always=True)
def thin_columns_fill_whole_tiles(broken):
    shape = (1 << 18, 1) if broken else (1, 1 << 18)

    def body(x_ref, out_ref):
        def scope(columns):
            columns[pl.ds(0, 1), pl.ds(0, 1)] = jnp.ones((1, 1), jnp.float32)
            out_ref[...] = jnp.zeros(OUT.shape, OUT.dtype) + columns[0, 0]

        pl.run_scoped(scope, pltpu.VMEM(shape, jnp.float32))  # fault

    kernel = cokernel.kernel(body, OUT, mesh=pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1))
    return lambda: kernel(X)
