"""Runs a function of Refs on one vector subcore of a chip that is not there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

# The chips with eight and with sixteen lanes.
CHIPS = {"v6e": 8, "tpu7x": 16}


def run_on_subcore(
    chip: str,
    body: Callable[..., Any],
    results: Sequence[Any],
    *arrays: Any,
    scratch: Sequence[Any] = (),
    **params: Any,
) -> list[np.ndarray]:
    """The results of `body(*inputs, *outputs, *scratch)`, whose Refs are all in the subcore's VMEM.

    `results` are shapes with dtypes; what an output holds at first is undefined.
    """
    arrays = tuple(jnp.asarray(array) for array in arrays)
    with cokernel.target(chip):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        types = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        local = [pltpu.VMEM(x.shape, x.dtype) for x in (*arrays, *types)]

        def whole(*refs: Any) -> None:
            count = len(arrays) + len(types)
            given, own, rest = refs[:count], refs[count : 2 * count], refs[2 * count :]
            for outside, inside in zip(given[: len(arrays)], own, strict=False):
                pltpu.sync_copy(outside, inside)
            body(*own, *rest)
            for inside, outside in zip(own[len(arrays) :], given[len(arrays) :], strict=True):
                pltpu.sync_copy(inside, outside)

        kernel = cokernel.kernel(
            whole,
            types,
            mesh=mesh,
            scratch_types=[*local, *scratch],
            compiler_params=cokernel.CompilerParams(**params),
        )
        return [np.asarray(result) for result in kernel(*arrays)]
