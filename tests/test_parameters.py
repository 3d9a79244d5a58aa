"""What a user asks of the compiler is checked when it is said."""

import dataclasses

import pytest
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import parameters


def test_none_means_the_defaults():
    assert parameters.resolve(None) == cokernel.CompilerParams()
    assert parameters.resolve(None).bounds_checks


def test_own_parameters_are_taken_as_they_are():
    own = cokernel.CompilerParams(num_workers=3, time_limit_s=0.5, bounds_checks=False)
    assert parameters.resolve(own) is own


def test_tpu_parameters_are_translated():
    tpu = pltpu.CompilerParams(
        disable_bounds_checks=True, has_side_effects=True, collective_id=7, vmem_limit_bytes=1
    )
    assert parameters.resolve(tpu) == cokernel.CompilerParams(
        bounds_checks=False, has_side_effects=True, collective_id=7
    )


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (pltpu.SideEffectType.PURE, False),
        (pltpu.SideEffectType.DATAFLOW_SIDE_EFFECTING, False),
        (pltpu.SideEffectType.SIDE_EFFECTING, True),
    ],
)
def test_kinds_of_side_effects(asked, meant):
    tpu = pltpu.CompilerParams(has_side_effects=asked)
    assert parameters.resolve(tpu).has_side_effects is meant


@pytest.mark.parametrize("other", [{"num_workers": 1}, 3, "fast"])
def test_anything_else_is_refused_with_what_is_accepted(other):
    with pytest.raises(TypeError, match=r"cokernel\.CompilerParams, .* a plgpu\.\w+ or None"):
        parameters.resolve(other)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("bounds_checks", 1, TypeError),
        ("num_workers", 0, ValueError),
        ("num_workers", True, TypeError),
        ("num_workers", 1.5, TypeError),
        ("time_limit_s", 0, ValueError),
        ("time_limit_s", -1.0, ValueError),
        ("time_limit_s", float("nan"), ValueError),
        ("time_limit_s", "1s", TypeError),
        ("collective_id", "a", TypeError),
        ("dump_llvm", None, TypeError),
    ],
)
def test_bad_values_are_refused_by_name(field, value, error):
    with pytest.raises(error, match=field):
        cokernel.CompilerParams(**{field: value})


def test_parameters_are_hashable_and_frozen():
    own = cokernel.CompilerParams(num_workers=2)
    assert hash(own) == hash(own.replace())
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.num_workers = 3
