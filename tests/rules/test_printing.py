"""A printed jaxpr shows a kernel by its programs, and only what is unusual about it."""

import jax
import jax.numpy as jnp

import cokernel

VECTOR4 = jax.ShapeDtypeStruct((4,), jnp.float32)


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def nothing(x_ref, o_ref):
    pass


def test_programs_are_shown_with_their_names_and_meshes():
    kernel = cokernel.mpmd_map(
        [(cokernel.CoreMesh(core=4), copy_body), (cokernel.CoreMesh(lane=2), nothing)], VECTOR4
    )
    text = str(jax.make_jaxpr(kernel)(jnp.ones(4)))
    assert "mpmd_map[" in text
    assert "name=copy_body_and_nothing" in text
    assert "copy_body on CoreMesh(core=4)={ lambda" in text
    assert "nothing on CoreMesh(lane=2)={ lambda" in text
    assert "interpret" not in text
    assert "metadata" not in text


def test_what_is_unusual_is_shown():
    kernel = cokernel.kernel(
        copy_body,
        VECTOR4,
        mesh=cokernel.CoreMesh(core=4),
        compiler_params=cokernel.CompilerParams(num_workers=3),
        input_output_aliases={0: 0},
    )
    text = str(jax.make_jaxpr(kernel)(jnp.ones(4)))
    assert "num_workers=3" in text
    assert "input_output_aliases=((0, 0),)" in text


def test_derivatives_are_shown_without_the_original():
    kernel = cokernel.kernel(copy_body, VECTOR4, mesh=cokernel.CoreMesh(core=4))
    x = jnp.ones(4)
    text = str(jax.make_jaxpr(lambda x: jax.jvp(kernel, (x,), (x,)))(x))
    assert "name=jvp_copy_body" in text
    assert text.count("lambda") == 2
