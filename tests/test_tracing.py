"""What `mpmd_map` and `kernel` accept, what programs receive, and what is said when it is wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax

CORES = cokernel.CoreMesh(core=4)
LANES = cokernel.CoreMesh(lane=2)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def traced(kernel, *args):
    """Returns the one kernel equation that calling `kernel` makes."""
    # A new function each time, because JAX remembers what it traced for a function.
    jaxpr = jax.make_jaxpr(lambda *args: kernel(*args))(*args)
    [eqn] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "mpmd_map"]
    return eqn


def arg_names(eqn):
    return [jaxpr.debug_info.arg_names for jaxpr in eqn.params["jaxprs"]]


def program_names(eqn):
    return [jaxpr.debug_info.func_name for jaxpr in eqn.params["jaxprs"]]


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


class TestForms:
    def test_the_three_forms_of_kernel_make_the_same_program(self):
        called = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)
        decorated = cokernel.kernel(out_type=VECTOR4, mesh=CORES)(copy_body)
        listed = cokernel.kernel([copy_body], VECTOR4, mesh=[CORES])
        texts = {str(traced(k, jnp.ones(4)).params["jaxprs"]) for k in (called, decorated, listed)}
        assert len(texts) == 1
        assert called.__name__ == "copy_body"

    def test_forms_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match="for several programs pass sequences"):
            cokernel.kernel(out_type=VECTOR4, mesh=[CORES])
        with pytest.raises(ValueError, match="both be sequences or both be single"):
            cokernel.kernel([copy_body], VECTOR4, mesh=CORES)
        with pytest.raises(ValueError, match="both be sequences or both be single"):
            cokernel.kernel(copy_body, VECTOR4, mesh=[CORES])
        with pytest.raises(ValueError, match="got 1 bodies and 2 meshes"):
            cokernel.kernel([copy_body], VECTOR4, mesh=[CORES, LANES])

    def test_programs_are_checked_when_the_kernel_is_made(self):
        with pytest.raises(ValueError, match="at least one program"):
            cokernel.mpmd_map([])
        with pytest.raises(TypeError, match="program 0 needs a mesh of cores"):
            cokernel.mpmd_map([(copy_body, CORES)])
        with pytest.raises(TypeError, match="program 1 needs a function behind its mesh, got 3"):
            cokernel.mpmd_map([(CORES, copy_body), (LANES, 3)])
        with pytest.raises(TypeError, match="program 0 must be a pair"):
            cokernel.mpmd_map([copy_body])
        with pytest.raises(ValueError, match="only one mesh per core type"):
            cokernel.mpmd_map([(CORES, copy_body), (CORES, copy_body)])
        with pytest.raises(TypeError, match="compiler_params must be"):
            cokernel.mpmd_map([(CORES, copy_body)], compiler_params={"num_workers": 1})

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"name": 3}, "name must be of type str, got 3"),
            ({"metadata": {"team": 3}}, r"metadata\['team'\] must be of type str, got 3"),
            ({"cost_estimate": 3}, "cost_estimate must be of type CostEstimate, got 3"),
            ({"input_output_aliases": [(0, 0)]}, "input_output_aliases must be of type Mapping"),
            ({"input_output_aliases": {"x": 0}}, "each key of input_output_aliases must be"),
        ],
    )
    def test_parameters_of_a_wrong_type_are_refused_by_name(self, params, message):
        with pytest.raises(TypeError, match=message):
            cokernel.kernel(copy_body, VECTOR4, mesh=CORES, **params)


class TestArguments:
    def test_programs_receive_inputs_then_outputs_then_scratch(self):
        def body(x_ref, y_ref, o_ref, buffer, done):
            assert x_ref.shape == (3,)
            assert y_ref.dtype == jnp.int8
            assert o_ref.shape == (4,)
            assert jax.typeof(buffer).memory_space == pltpu.VMEM

        kernel = cokernel.kernel(
            body,
            VECTOR4,
            mesh=CORES,
            scratch_types=(cokernel.private((5,), F32), pltpu.SemaphoreType.REGULAR((2,))),
        )
        eqn = traced(kernel, jnp.ones(3), jnp.ones(2, jnp.int8))
        assert arg_names(eqn) == [("x_ref", "y_ref", "o_ref", "buffer", "done")]

    def test_scratch_in_a_mapping_is_passed_by_keyword(self):
        def body(x_ref, o_ref, *, zeta, alpha):
            assert zeta.shape == (7,)
            assert alpha.shape == (8,)

        kernel = cokernel.kernel(
            body,
            VECTOR4,
            mesh=CORES,
            scratch_types={
                "zeta": cokernel.private((7,), F32),
                "alpha": cokernel.private((8,), F32),
            },
        )
        eqn = traced(kernel, jnp.ones(3))
        assert arg_names(eqn) == [("x_ref", "o_ref", "alpha", "zeta")]
        shapes = [var.aval.shape for var in eqn.params["jaxprs"][0].invars]
        assert shapes == [(3,), (4,), (8,), (7,)]

    def test_pytrees_arrive_as_they_are_passed(self):
        def body(pair, table, o_refs, last):
            pair[0][...], table["key"][...], o_refs["a"][...], last[...]

        kernel = cokernel.kernel(body, [{"a": VECTOR4, "b": VECTOR4}, VECTOR4], mesh=CORES)
        eqn = traced(kernel, (jnp.ones(1), jnp.ones(2)), {"key": jnp.ones(3)})
        assert arg_names(eqn) == [
            ("pair[0]", "pair[1]", "table['key']", "o_refs['a']", "o_refs['b']", "last")
        ]
        out = jax.eval_shape(kernel, (jnp.ones(1), jnp.ones(2)), {"key": jnp.ones(3)})
        assert jax.tree.map(lambda x: x.shape, out) == [{"a": (4,), "b": (4,)}, (4,)]

    def test_a_single_output_is_one_argument_and_one_result(self):
        assert jax.eval_shape(cokernel.kernel(copy_body, VECTOR4, mesh=CORES), jnp.ones(4)).shape

    def test_python_numbers_and_numpy_arrays_are_arrays(self):
        def body(x_ref, n_ref, o_ref):
            assert x_ref.dtype == jnp.float16
            assert n_ref.shape == ()
            assert not n_ref.weak_type

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        assert traced(kernel, np.ones(3, np.float16), 3).outvars[0].aval.shape == (4,)

    def test_zero_sized_arrays_are_accepted(self):
        out_type = jax.ShapeDtypeStruct((0, 3), F32)
        assert traced(cokernel.kernel(copy_body, out_type, mesh=CORES), jnp.ones((0, 3)))

    def test_a_wrong_number_of_arguments_names_the_program_and_both_counts(self):
        kernel = cokernel.mpmd_map(
            [(CORES, copy_body), (LANES, lambda x_ref, y_ref, o_ref: None)],
            VECTOR4,
        )
        with pytest.raises(
            TypeError,
            match=r"program copy_body at .*test_tracing.py:\d+ takes \(x_ref, o_ref\), but the "
            r"kernel passes it 3 \(2 from the call, 1 from out_types, 0 from scratch_types\)",
        ):
            kernel(jnp.ones(4), jnp.ones(4))
        with pytest.raises(TypeError, match=r"program <lambda> .*missing a required argument"):
            kernel(jnp.ones(4))

    def test_scratch_whose_name_is_taken_is_refused(self):
        kernel = cokernel.kernel(
            copy_body, VECTOR4, mesh=CORES, scratch_types={"x_ref": cokernel.private((1,), F32)}
        )
        with pytest.raises(TypeError, match=r"by keyword: x_ref.*multiple values"):
            kernel(jnp.ones(4))

    def test_a_program_that_returns_something_is_refused(self):
        kernel = cokernel.kernel(lambda x_ref, o_ref: x_ref[...], VECTOR4, mesh=CORES)
        with pytest.raises(ValueError, match=r"program <lambda> at .* must return None"):
            kernel(jnp.ones(4))

    def test_bad_outputs_and_scratch_are_named_by_their_place(self):
        with pytest.raises(TypeError, match=r"out_types\[1\]\['a'\] of kernel 'copy_body' must be"):
            cokernel.kernel(copy_body, [VECTOR4, {"a": "float32"}], mesh=CORES)(jnp.ones(4))
        with pytest.raises(TypeError, match=r"scratch_types\[0\] of kernel 'copy_body' must be"):
            cokernel.kernel(copy_body, VECTOR4, mesh=CORES, scratch_types=[VECTOR4])(jnp.ones(4))

    def test_something_that_is_no_array_is_refused(self):
        with pytest.raises(TypeError, match="non-array argument"):
            cokernel.kernel(copy_body, VECTOR4, mesh=CORES)(object())


class TestScratchOfSeveralPrograms:
    @pytest.fixture
    def vector_and_scalar(self):
        with cokernel.target("v6e"):
            return (
                plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
                plsc.ScalarSubcoreMesh(axis_name="core"),
            )

    @staticmethod
    def kernel(all_meshes, scratch):
        programs = [(mesh, lambda x_ref, o_ref, scratch_ref: None) for mesh in all_meshes]
        return cokernel.mpmd_map(programs, VECTOR4, scratch_types=[scratch])

    @pytest.mark.parametrize(
        "scratch",
        [pltpu.VMEM((8,), F32), pltpu.SMEM((8,), F32), pltpu.SemaphoreType.DMA],
    )
    def test_private_scratch_must_say_whose_it_is(self, vector_and_scalar, scratch):
        with pytest.raises(ValueError, match=r"scratch_types\[0\] .*not say to which .*@ mesh"):
            self.kernel(vector_and_scalar, scratch)(jnp.ones(4))

    @pytest.mark.parametrize("scratch", [pltpu.HBM((8,), F32), pltpu.VMEM_SHARED((8,), F32)])
    def test_shared_scratch_need_not(self, vector_and_scalar, scratch):
        assert traced(self.kernel(vector_and_scalar, scratch), jnp.ones(4))

    def test_shared_scratch_must_where_there_are_two_shared_memories(self):
        with pytest.raises(ValueError, match="does not say to which"):
            self.kernel([CORES, LANES], cokernel.shared((8,), F32))(jnp.ones(4))
        assert traced(self.kernel([CORES, LANES], cokernel.shared((8,), F32) @ LANES), jnp.ones(4))

    def test_scratch_of_a_mesh_without_a_program_is_refused(self):
        other = cokernel.CoreMesh(other=1)
        with pytest.raises(ValueError, match=r"tied to CoreMesh\(other=1\), on which no program"):
            self.kernel([CORES, LANES], cokernel.private((8,), F32) @ other)(jnp.ones(4))


class TestRefs:
    def test_refs_are_arguments_and_their_effects_come_out(self):
        def body(x_ref, y_ref, o_ref):
            x_ref[...] = y_ref[...]

        eqn = traced(
            lambda x, y: cokernel.kernel(body, VECTOR4, mesh=CORES)(x, y),
            jax.new_ref(jnp.ones(4)),
            jax.new_ref(jnp.ones(4)),
        )
        position = eqn.invars.index
        effects = {(type(effect).__name__, position(effect.input)) for effect in eqn.effects}
        assert effects == {("WriteEffect", 0), ("ReadEffect", 1)}

    def test_part_of_a_ref_is_an_argument(self):
        def body(x_ref, o_ref):
            assert x_ref.shape == (2,)
            o_ref[...] = x_ref[...]

        kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((2,), F32), mesh=CORES)
        ref = jax.new_ref(jnp.arange(8.0))
        eqn = traced(lambda start: kernel(ref.at[pl.ds(start, 2)]), 1)
        assert arg_names(eqn)[0][0] == "x_ref"
        assert [getattr(var.aval, "shape", None) for var in eqn.invars] == [(8,), ()]

    def test_what_several_programs_close_over_ends_in_one_signature(self):
        first, second = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(2))
        factor = jnp.float32(2) + 1

        def one(x_ref, o_ref):
            first[...] = x_ref[...] * factor

        def two(value_ref, out_ref):
            second[0] = first[0] * factor

        kernel = cokernel.mpmd_map([(CORES, one), (LANES, two)], VECTOR4)
        eqn = traced(kernel, jnp.ones(4))
        assert arg_names(eqn) == [
            ("x_ref", "factor", "first", "second", "o_ref"),
            ("value_ref", "factor", "first", "second", "out_ref"),
        ]
        for jaxpr in eqn.params["jaxprs"]:
            assert jaxpr.constvars == []
        types = [[var.aval.str_short() for var in j.invars] for j in eqn.params["jaxprs"]]
        assert types[0] == types[1]
        assert len(eqn.invars) == 4

    def test_closing_over_arrays_is_refused_with_names_and_advice(self):
        table = jnp.arange(6.0).reshape(2, 3)

        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + table[0, 0]

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        message = r"program body at .* closes over arrays: table of type float32\[2,3\].*arguments"
        for call in (kernel, jax.jit(kernel)):
            with pytest.raises(ValueError, match=message):
                call(jnp.ones(4))

    def test_arrays_behind_other_functions_and_in_trees_are_named_too(self):
        tables = {"first": [jnp.arange(4.0)]}

        def look_up(i):
            return tables["first"][0][i]

        def body(x_ref, o_ref):
            o_ref[0] = x_ref[0] + look_up(0)

        with pytest.raises(ValueError, match=r"tables\['first'\]\[0\] of type float32\[4\]"):
            cokernel.kernel(body, VECTOR4, mesh=CORES)(jnp.ones(4))

    def test_numpy_arrays_are_named_too(self):
        first, second = np.arange(4, dtype=np.float32), np.ones(4, np.float32)

        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * first + second

        message = r"first of type float32\[4\], second of type float32\[4\]"
        with pytest.raises(ValueError, match=message):
            cokernel.kernel(body, VECTOR4, mesh=CORES)(jnp.ones(4))

    def test_the_same_ref_twice_is_refused(self):
        kernel = cokernel.kernel(lambda x_ref, y_ref, o_ref: None, VECTOR4, mesh=CORES)
        ref = jax.new_ref(jnp.ones(4))
        with pytest.raises(ValueError, match="the same Ref twice, as 'x_ref' and as 'y_ref'"):
            kernel(ref, ref)
        with pytest.raises(ValueError, match="the same Ref twice, as 'x_ref' and as 'y_ref'"):
            jax.jit(lambda r: kernel(r, r))(ref)
        with pytest.raises(ValueError, match="the same Ref twice"):
            kernel(ref.at[0:2], ref.at[2:4])

    def test_a_ref_that_is_passed_and_closed_over_is_refused(self):
        ref = jax.new_ref(jnp.ones(4))

        def body(x_ref, o_ref):
            ref[...] = x_ref[...]

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        with pytest.raises(ValueError, match=r"a Ref as 'x_ref' and .* closes over .* as 'ref'"):
            kernel(ref)

    def test_refs_of_another_mesh_bring_it_along(self):
        other = cokernel.CoreMesh(other=2)

        def give(sem_ref):
            pass

        def take(sem_ref):
            pl.semaphore_signal(sem_ref, device_id={"other": 1})

        give_kernel = cokernel.kernel(give, pltpu.SemaphoreType.REGULAR @ other, mesh=CORES)

        def both():
            space = (pltpu.SemaphoreType.REGULAR @ other).memory_space
            cokernel.kernel(take, mesh=CORES)(jax.new_ref(give_kernel(), memory_space=space))

        eqn = [e for e in jax.make_jaxpr(both)().eqns if e.primitive.name == "mpmd_map"][1]
        assert eqn.params["external_meshes"] == (other,)
        assert not any("NamedAxis" in type(e).__name__ for e in eqn.effects)


class TestAliases:
    def test_an_output_takes_the_type_of_its_input(self):
        kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES, input_output_aliases={0: 0})
        assert traced(kernel, jnp.ones(4)).params["input_output_aliases"] == ((0, 0),)

    @pytest.mark.parametrize("aliases", [{1: 0}, {0: 1}, {-1: 0}])
    def test_places_that_do_not_exist_are_refused(self, aliases):
        kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES, input_output_aliases=aliases)
        with pytest.raises(ValueError, match="the kernel has 1 inputs and 1 outputs"):
            kernel(jnp.ones(4))

    def test_types_that_differ_are_refused(self):
        kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES, input_output_aliases={0: 0})
        with pytest.raises(ValueError, match=r"float32\[3\] to output 0 of type float32\[4\]"):
            kernel(jnp.ones(3))

    def test_two_inputs_for_one_output_are_refused(self):
        kernel = cokernel.kernel(
            lambda x_ref, y_ref, o_ref: None,
            VECTOR4,
            mesh=CORES,
            input_output_aliases={0: 0, 1: 0},
        )
        with pytest.raises(ValueError, match="maps two inputs to output 0"):
            kernel(jnp.ones(4), jnp.ones(4))


class TestNames:
    def test_programs_are_named_as_their_functions(self):
        kernel = cokernel.mpmd_map(
            [(CORES, copy_body), (LANES, functools.partial(copy_body))], VECTOR4
        )
        assert program_names(traced(kernel, jnp.ones(4))) == [
            "copy_body__cpu_core_core",
            "copy_body__cpu_core_lane",
        ]

    def test_the_kernels_name_names_its_programs(self):
        kernel = cokernel.mpmd_map([(CORES, copy_body)], VECTOR4, name="copy it")
        eqn = traced(kernel, jnp.ones(4))
        assert eqn.params["name"] == "copy it"
        assert program_names(eqn) == ["copy_it"]

    def test_metadata_is_a_parameter(self):
        kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES, metadata={"a": "b"})
        assert dict(traced(kernel, jnp.ones(4)).params["metadata"]) == {"a": "b"}

    def test_debug_prints_each_program_once(self, capsys):
        kernel = cokernel.mpmd_map(
            [(CORES, copy_body), (LANES, lambda x_ref, o_ref: None)], VECTOR4, debug=True
        )
        traced(kernel, jnp.ones(4))
        printed = capsys.readouterr().out
        assert printed.count("program copy_body at") == 1
        assert "on CoreMesh(lane=2):\n{ lambda" in printed


class TestAxes:
    def test_a_program_knows_only_its_own_axes(self):
        def body(x_ref, o_ref):
            o_ref[0] = lax.axis_index("lane").astype(F32)

        kernel = cokernel.mpmd_map([(CORES, body), (LANES, copy_body)], VECTOR4)
        with pytest.raises(
            ValueError, match=r"program body at .* axis 'lane' at .*test_tracing.py:\d+.*, but it"
        ):
            kernel(jnp.ones(4))

    def test_an_axis_that_there_is_not_is_refused_with_the_axes_there_are(self):
        def body(x_ref, o_ref):
            o_ref[0] = lax.axis_index("cor").astype(F32)

        with pytest.raises(NameError, match=r"program body at .*axes are 'core': .*axis name: cor"):
            cokernel.kernel(body, VECTOR4, mesh=CORES)(jnp.ones(4))

    def test_a_device_id_of_an_axis_that_there_is_not_is_refused_with_its_line(self):
        def body(x_ref, o_ref, sem_ref):
            pl.semaphore_signal(sem_ref, 1, device_id={"cor": 0})

        kernel = cokernel.kernel(
            body, VECTOR4, mesh=CORES, scratch_types=[pltpu.SemaphoreType.REGULAR]
        )
        message = r"program body at .* names the axis 'cor' at .*test_tracing.py:\d+.* axes 'core'"
        with pytest.raises(ValueError, match=message):
            kernel(jnp.ones(4))

    def test_an_axis_of_the_surroundings_cannot_be_hidden(self):
        kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)
        with pytest.raises(ValueError, match=r"axis 'core' of .* of the surrounding"):
            jax.vmap(kernel, axis_name="core")(jnp.ones((2, 4)))


class TestTarget:
    @staticmethod
    def body(x_ref, o_ref):
        assert plsc.get_sparse_core_info().num_lanes == 8
        o_ref[...] = x_ref[...]

    def test_a_kernel_remembers_the_chip_it_was_made_for(self):
        with cokernel.target("v6e"):
            mesh = plsc.ScalarSubcoreMesh(axis_name="core")
            kernel = cokernel.kernel(self.body, VECTOR4, mesh=mesh)
        assert traced(kernel, jnp.ones(4)).params["target"] == "v6e"
        with cokernel.target("7x"):
            assert traced(kernel, jnp.ones(4)).params["target"] == "v6e"

    def test_without_a_chip_the_error_says_how_to_pretend_one(self):
        kernel = cokernel.kernel(self.body, VECTOR4, mesh=CORES)
        with pytest.raises(ValueError, match="Unsupported TPU device kind") as caught:
            traced(kernel, jnp.ones(4))
        assert "cokernel.target" in caught.value.__notes__[0]


class TestTraceCount:
    @pytest.fixture
    def counted(self):
        count = []

        def body(x_ref, o_ref):
            count.append(1)
            o_ref[0] = x_ref[0].astype(F32)

        return cokernel.kernel(body, VECTOR4, mesh=CORES), count

    def test_tracing_again_with_equal_types_does_not_run_the_body(self, counted):
        kernel, count = counted
        for _ in range(3):
            traced(kernel, jnp.ones(4))
        assert len(count) == 1
        traced(kernel, jnp.ones(4, jnp.int32))
        assert len(count) == 2

    def test_a_body_that_closes_over_a_ref_is_traced_with_the_present_one(self):
        refs = [jax.new_ref(jnp.zeros(1)), jax.new_ref(jnp.zeros(2))]
        current = [refs[0]]

        def body(x_ref, o_ref):
            current[0][0] = x_ref[0]

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        assert traced(kernel, jnp.ones(4)).invars[1].aval.shape == (1,)
        current[0] = refs[1]
        assert traced(kernel, jnp.ones(4)).invars[1].aval.shape == (2,)


def test_control_flow_in_programs_is_traced_while_jit_is_disabled():
    def body(x_ref, o_ref):
        @pl.loop(0, 4)
        def _(i):
            o_ref[i] = x_ref[i]

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
    eqn = traced(kernel, jnp.ones(4))
    with jax.disable_jit():
        again = traced(kernel, jnp.ones(4))
    assert str(eqn.params["jaxprs"]) == str(again.params["jaxprs"])
    assert "scan" in str(eqn.params["jaxprs"])


def test_vma_of_outputs_is_that_of_the_inputs():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    def sharded(x):
        out = kernel(x)
        assert jax.typeof(out).manual_axis_type == _jax.ManualAxisType(varying=frozenset({"x"}))
        return out

    assert jax.eval_shape(sharded, jnp.ones(16)).shape == (16,)
