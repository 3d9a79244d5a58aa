"""Meshes: our own, which fit together, and chips that are only pretended."""

import copy
import pickle
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax, meshes


@pytest.fixture
def tpu_meshes():
    with cokernel.target("v6e"):
        return (
            pltpu.TensorCoreMesh(axis_name="tc"),
            plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
            plsc.ScalarSubcoreMesh(axis_name="core"),
        )


class TestTarget:
    @pytest.mark.parametrize(
        ("name", "tensor_cores", "sparse_cores", "subcores", "lanes"),
        [("v5p", 2, 4, 16, 8), ("v6e", 1, 2, 16, 8), ("tpu7x", 1, 2, 16, 16), ("8i", 1, 1, 4, 16)],
    )
    def test_meshes_have_the_numbers_of_the_chip(
        self, name, tensor_cores, sparse_cores, subcores, lanes
    ):
        with cokernel.target(name):
            vector = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s")
            scalar = plsc.ScalarSubcoreMesh(axis_name="c")
            tensor = pltpu.TensorCoreMesh(axis_name="t")
            assert plsc.get_sparse_core_info().num_lanes == lanes
            assert pltpu.get_tpu_info().num_cores == tensor_cores
        assert dict(vector.shape) == {"c": sparse_cores, "s": subcores}
        assert dict(scalar.shape) == {"c": sparse_cores}
        assert dict(tensor.shape) == {"t": tensor_cores}

    def test_explicit_sizes_are_kept_and_checked(self):
        with cokernel.target("v6e"):
            mesh = plsc.VectorSubcoreMesh(
                core_axis_name="c", subcore_axis_name="s", num_cores=1, num_subcores=3
            )
            with pytest.raises(ValueError, match="only 2 SparseCores"):
                plsc.ScalarSubcoreMesh(axis_name="c", num_cores=3)
        assert meshes.mesh_size(mesh) == 3

    @pytest.mark.parametrize("name", meshes.chip_names())
    def test_every_chip_of_jax_can_be_pretended(self, name):
        with cokernel.target(name):
            assert str(pltpu.get_tpu_info().chip_version) == name

    @pytest.mark.parametrize(
        ("alias", "name"),
        [("TPU v6 lite", "v6e"), ("TPU7x", "7x"), ("v7x", "7x"), ("TPU v5", "v5p"), ("V4", "v4")],
    )
    def test_other_names_of_a_chip(self, alias, name):
        assert cokernel.target(alias).name == name

    def test_unknown_names_list_the_known_ones(self):
        with pytest.raises(ValueError, match=r"no target 'v99'; known are v2, .*v6e"):
            cokernel.target("v99")
        with pytest.raises(TypeError, match="named by a string"):
            cokernel.target(6)

    def test_jax_is_as_before_afterwards(self):
        registry = _jax.tpu_info.registry
        with cokernel.target("v6e"):
            assert _jax.tpu_info.registry is not registry
        with pytest.raises(ZeroDivisionError), cokernel.target("v6e"):
            raise ZeroDivisionError
        assert _jax.tpu_info.registry is registry
        assert not hasattr(jax.devices()[0], "num_cores")
        with pytest.raises(ValueError, match="Unsupported TPU device kind"):
            pltpu.get_tpu_info()

    def test_targets_nest_and_one_object_can_be_entered_again(self):
        outer = cokernel.target("v6e")
        with outer:
            with cokernel.target("v5p"):
                assert pltpu.get_tpu_info().generation == 5
                with outer:
                    assert pltpu.get_tpu_info().generation == 6
            assert pltpu.get_tpu_info().generation == 6
        assert meshes.current_target() is None

    def test_target_decorates_a_function(self):
        @cokernel.target("7x")
        def generation():
            return pltpu.get_tpu_info().generation

        assert [generation(), generation()] == [7, 7]
        assert meshes.current_target() is None

    def test_threads_do_not_see_each_others_targets(self):
        inside, leave = threading.Event(), threading.Event()

        def pretend():
            with cokernel.target("v5p"):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=pretend)
        thread.start()
        inside.wait()
        try:
            assert meshes.current_target() is None
            with pytest.raises(ValueError, match="Unsupported TPU device kind"):
                pltpu.get_tpu_info()
            assert not hasattr(jax.devices()[0], "num_cores")
            with cokernel.target("v6e"):
                assert pltpu.get_tpu_info().generation == 6
        finally:
            leave.set()
            thread.join()

    def test_the_setting_holds_in_all_threads_until_it_is_taken_back(self):
        registry = _jax.tpu_info.registry
        seen = []
        cokernel.set_target("v5p")
        try:
            cokernel.set_target("v6e")
            thread = threading.Thread(target=lambda: seen.append(pltpu.get_tpu_info().generation))
            thread.start()
            thread.join()
            with cokernel.target("v5p"):
                assert pltpu.get_tpu_info().generation == 5
        finally:
            cokernel.set_target(None)
        assert seen == [6]
        assert _jax.tpu_info.registry is registry

    def test_a_function_traced_for_one_chip_does_not_serve_another(self):
        @jax.jit
        def lanes():
            return plsc.get_sparse_core_info().num_lanes

        with cokernel.target("v6e"):
            assert lanes() == 8
        with cokernel.target("7x"):
            assert lanes() == 16

    def test_importing_starts_nothing(self):
        program = """
import threading
threads = threading.active_count()
import cokernel
from jax._src import tpu_info, xla_bridge
assert not xla_bridge.backends_are_initialized()
with cokernel.target("v6e"):
    from jax.experimental.pallas import tpu as pltpu
    pltpu.get_tpu_info
assert not xla_bridge.backends_are_initialized()
assert type(tpu_info.registry) is dict
assert threading.active_count() == threads
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestCoreMesh:
    def test_axes_keep_their_order(self):
        mesh = cokernel.CoreMesh(row=2, column=3)
        assert list(mesh.shape.items()) == [("row", 2), ("column", 3)]
        assert mesh.size == 6
        assert repr(mesh) == "CoreMesh(row=2, column=3)"

    def test_equal_meshes_are_equal_and_hash_alike(self):
        mesh = cokernel.CoreMesh(core=4)
        assert mesh == cokernel.CoreMesh(core=4)
        assert hash(mesh) == hash(cokernel.CoreMesh(core=4))
        assert mesh != cokernel.CoreMesh(core=5)
        assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh

    def test_bad_axes_are_refused(self):
        with pytest.raises(ValueError, match="at least one axis"):
            cokernel.CoreMesh()
        with pytest.raises(ValueError, match="'core' of a CoreMesh needs at least one core, got 0"):
            cokernel.CoreMesh(core=0)
        with pytest.raises(TypeError, match="'core' of a CoreMesh needs an int"):
            cokernel.CoreMesh(core=2.0)

    def test_memory_spaces_can_be_tied_to_it(self):
        mesh = cokernel.CoreMesh(core=2)
        for space in (pltpu.VMEM, pltpu.SMEM, pltpu.VMEM_SHARED):
            tied = (space @ mesh)((4,), jnp.float32)
            assert tied.memory_space.mesh == mesh
        semaphore = pltpu.SemaphoreType.REGULAR @ mesh
        assert str(semaphore.memory_space) == "semaphore_mem@cpu_core_core"

    def test_private_and_shared_memory(self):
        mesh = cokernel.CoreMesh(core=2)
        assert cokernel.private((4, 2), jnp.int8).memory_space == pltpu.VMEM
        assert cokernel.shared([4], jnp.int8).memory_space == pltpu.VMEM_SHARED
        assert (cokernel.private((4,), jnp.int8) @ mesh).memory_space.mesh is mesh


class TestCompatibility:
    def test_all_kinds_of_cores_fit_together(self, tpu_meshes):
        meshes.check_compatible(
            [*tpu_meshes, cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=4, lane=2)]
        )

    def test_sparse_cores_need_the_same_core_axis(self, tpu_meshes):
        _, vector, _ = tpu_meshes
        with cokernel.target("v6e"):
            other_name = plsc.ScalarSubcoreMesh(axis_name="sc")
            other_size = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)
        with pytest.raises(ValueError, match=r"same SparseCores.*'core' of size 2.*'sc' of size 2"):
            meshes.check_compatible([vector, other_name])
        with pytest.raises(ValueError, match=r"same SparseCores.*of size 2.*of size 1"):
            meshes.check_compatible([vector, other_size])

    def test_there_is_one_mesh_of_each_core_type(self, tpu_meshes):
        for mesh in tpu_meshes:
            with pytest.raises(ValueError, match=r"only one mesh per core type.*join the two"):
                meshes.check_compatible([mesh, mesh])
        with pytest.raises(ValueError, match=r"CoreMesh\(core=1\).*CoreMesh\(core=2\).*different"):
            meshes.check_compatible([cokernel.CoreMesh(core=1), cokernel.CoreMesh(core=2)])

    def test_axis_names_differ_elsewhere(self, tpu_meshes):
        tensor, vector, scalar = tpu_meshes
        for mesh in (vector, scalar):
            with pytest.raises(ValueError, match=r"both have an axis named 'core': rename it"):
                meshes.check_compatible([pltpu.TensorCoreMesh(axis_name="core", num_cores=1), mesh])
        with pytest.raises(ValueError, match="both have an axis named 'subcore'"):
            meshes.check_compatible([vector, cokernel.CoreMesh(core2=1, subcore=1)])
        with pytest.raises(ValueError, match="both have an axis named 'tc'"):
            cokernel.CoreMesh(tc=1).check_is_compatible_with(tensor)

    def test_a_mesh_fits_itself_only_if_its_axes_do(self):
        with cokernel.target("v6e"):
            same = plsc.VectorSubcoreMesh(core_axis_name="x", subcore_axis_name="x")
            empty = plsc.ScalarSubcoreMesh(axis_name="x", num_cores=0)
        with pytest.raises(ValueError, match="two different names"):
            meshes.check_compatible([same])
        with pytest.raises(ValueError, match="has 0 cores"):
            meshes.check_compatible([empty])
