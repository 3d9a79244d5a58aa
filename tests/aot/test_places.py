"""Finding the line that is refused, with a stand-in for a compiler that refuses one operation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import primitive
from cokernel.aot import memory, places

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)
FIRST, SECOND = cokernel.CoreMesh(first=2), cokernel.CoreMesh(second=2)


def refuses(name):
    """Returns whether any program has an operation of this name, at any depth."""

    def is_refused(jaxpr):
        return any(
            eqn.primitive.name == name
            for kernel in memory.kernels(jaxpr)
            for program in kernel.params["jaxprs"]
            for eqn in primitive.all_equations(program)
        )

    return is_refused


def traced(first, second):
    kernel = cokernel.mpmd_map(
        [(FIRST, first), (SECOND, second)],
        VECTOR,
        scratch_types=[pltpu.SemaphoreType.REGULAR @ FIRST],
    )
    return jax.make_jaxpr(lambda x: lax.fori_loop(0, 2, lambda _, value: kernel(value), x))(
        jnp.zeros(8)
    )


def copy(x_ref, o_ref, ready):
    o_ref[...] = x_ref[...]


def deep(x_ref, o_ref, ready):
    value = x_ref[0]

    @pl.loop(0, 3)
    def _step(step):
        @pl.when(step > 1)
        def _last():
            pl.semaphore_wait(ready)
            o_ref[0] = jnp.tan(value)
            pl.semaphore_signal(ready)

    o_ref[1] = value


@pytest.mark.parametrize("operation", ["tan", "semaphore_wait", "semaphore_signal"])
def test_an_operation_is_found_at_any_depth_in_the_second_program(operation, line_of):
    place = places.find(traced(copy, deep), refuses(operation))
    assert (place.program, place.what) == ("deep", operation)
    assert place.line == line_of(deep, operation.removeprefix("semaphore_") + "(")


def test_an_operation_behind_a_loop_is_found(line_of):
    def behind(x_ref, o_ref, ready):
        total = lax.fori_loop(0, 3, lambda step, total: total + x_ref[step], 0.0)
        o_ref[0] = jnp.sin(total)

    place = places.find(traced(behind, copy), refuses("sin"))
    assert (place.program, place.line) == ("behind", line_of(behind, "jnp.sin"))


def test_what_is_refused_without_any_operation_is_not_in_the_programs():
    assert places.find(traced(copy, deep), lambda jaxpr: True) is None


def test_the_users_line_of_an_error_is_that_of_its_cause(line_of):
    def fails():
        return 1 // 0

    def wraps():
        try:
            fails()
        except ZeroDivisionError as error:
            raise ValueError("it failed") from error

    with pytest.raises(ValueError, match="it failed") as error:
        wraps()
    assert places.line_of_error(error.value) == line_of(fails, "1 // 0")


def test_methods_that_a_library_makes_of_text_are_not_the_users():
    namespace = {"__name__": "some_library"}
    exec("def check(): raise ValueError", namespace)

    def body():
        namespace["check"]()

    with pytest.raises(ValueError) as error:
        body()
    line = body.__code__.co_firstlineno + 1
    assert places.line_of_error(error.value) == f"{__file__}:{line}"


def test_a_function_is_found_where_the_user_defines_it():
    def inner(x):
        return x

    line = f"{__file__}:{inner.__code__.co_firstlineno}"
    assert places.line_of_definition(inner) == line
    assert places.line_of_definition(functools.partial(jax.jit(inner), 1)) == line
    assert places.line_of_definition(max) == ""
