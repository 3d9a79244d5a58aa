"""The chips that kernels can be compiled for where they are not."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

from cokernel import meshes

# The axis of the mesh under which JAX lowers: unlikely to be an axis of the function's own.
MESH_AXIS = "cokernel_aot"


@dataclasses.dataclass(frozen=True)
class _CudaDevice(jax.sharding.AbstractDevice):
    """A device that answers what Mosaic GPU asks of a real one."""

    compute_capability: str


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip, and how its compiler is told of it.

    Attributes:
      name: what users call it.
      platform: JAX's name for its platform, "tpu" or "cuda".
      device_kind: what JAX's device of this chip calls itself.
      num_cores: TensorCores per device of a TPU; 1 for a GPU.
      topology: what the compiler calls the smallest machine with this chip.
      modules: what has to be importable where the compiler runs.
      extra: the name of Cokernel's extra that brings it.
      environment: variables that the compiler reads.
      folders: variables that name a folder in which the compiler may write, with its name.
      topology_options: what else describes the chip to the compiler.
      compute_capability: NVIDIA's number for what a GPU can do; empty for a TPU.
      device_memory: bytes of a GPU's large memory; 0 for a TPU, of which JAX knows it.
      more_budget: what this chip has of memories of which others have less or more: bytes, or a
        number of semaphores.
    """

    name: str
    platform: str
    device_kind: str
    num_cores: int
    topology: str
    modules: tuple[str, ...]
    extra: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
    topology_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compute_capability: str = ""
    device_memory: int = 0
    more_budget: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def abstract_mesh(self) -> Any:
        """Returns a mesh of one device of this chip, under which JAX lowers for it."""
        description = (self.device_kind, self.num_cores, self.platform)
        device: Any = jax.sharding.AbstractDevice(*description)
        if self.compute_capability:
            device = _CudaDevice(*description, self.compute_capability)
        return jax.sharding.AbstractMesh(
            (1,),
            (MESH_AXIS,),
            axis_types=(jax.sharding.AxisType.Auto,),
            abstract_device=device,
        )

    def memory_budget(self) -> dict[str, int]:
        """Returns the bytes, or semaphores, that a kernel can have of each memory, by its name."""
        if self.platform != "tpu":
            return {"HBM": self.device_memory, **_GPU_BUDGET, **self.more_budget}
        info = meshes.chip_info(self.name)
        sparse = info.sparse_core
        assert sparse is not None, f"{self.name} is expected to have SparseCores"
        # One memory of a SparseCore holds what its subcores share and what each has for itself.
        shared = sparse.num_subcores * sparse.vmem_capacity_bytes
        return {
            # JAX gives the share of one TensorCore, of which a device may have two.
            "HBM": info.hbm_capacity_bytes * info.num_cores,
            "VMEM of a TensorCore": info.vmem_capacity_bytes,
            "SMEM of a TensorCore": info.smem_capacity_bytes,
            "VMEM of a vector subcore": sparse.vmem_capacity_bytes,
            "shared memory of a SparseCore": shared,
            "shared memory and VMEM of a SparseCore": shared,
            **_SPARSE_CORE_BUDGET,
            **self.more_budget,
        }


# CUDA's programming guide, of compute capability 9 and 10: shared memory of one block, and 255
# registers of 32 bits for each of a warpgroup's 128 threads.
_GPU_BUDGET = {"shared memory of a block": 227 * 1024, "registers of a warpgroup": 255 * 4 * 128}

# What libtpu's compiler names in its refusals as its limits, which JAX does not publish. Of a
# scalar subcore's memory it takes up to a hundred words itself, depending on the kernel.
_SPARSE_CORE_BUDGET = {
    "SMEM of a vector subcore": 2047 * 4,
    "SMEM of a scalar subcore": 16384 * 4,
}


def _tpu(
    name: str,
    device_kind: str,
    num_cores: int,
    topology: str,
    accelerator: str,
    semaphores: tuple[int, int],
) -> Target:
    of_tensor_core, of_vector_subcore = semaphores
    return Target(
        name=name,
        platform="tpu",
        device_kind=device_kind,
        num_cores=num_cores,
        topology=topology,
        modules=("libtpu",),
        extra="tpu",
        environment={
            # There is no machine to ask, and no other machine to talk to.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": accelerator,
            # Several processes may compile at once.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        },
        more_budget={
            "semaphores of a TensorCore": of_tensor_core,
            "semaphores of a vector subcore": of_vector_subcore,
        },
    )


_DEVICE_MEMORY = re.compile(r"device_memory_size: (\d+)")


def _gpu(
    name: str, device_kind: str, num_cores: int, compute_capability: str, tensor_memory: int
) -> Target:
    description = pathlib.Path(__file__).with_name(f"{name}.txtpb").read_text()
    [device_memory] = _DEVICE_MEMORY.findall(description)
    return Target(
        name=name,
        platform="cuda",
        device_kind=device_kind,
        num_cores=num_cores,
        topology="1x1x1",
        modules=("jax_plugins.xla_cuda13",),
        extra="gpu",
        # There is no driver whose version could be checked.
        environment={"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        # What ptxas says of registers goes to a file.
        folders={"MOSAIC_GPU_DUMP_TO": "dump"},
        topology_options={"topology": "1x1x1", "target_config": description},
        compute_capability=compute_capability,
        device_memory=int(device_memory),
        more_budget={"TMEM": tensor_memory},
    )


_ALL = (
    _tpu("v5p", "TPU v5", 2, "v5p:2x2x1", "v5p-8", (512, 27)),
    _tpu("v6e", "TPU v6 lite", 1, "v6e:2x2", "v6e-4", (512, 27)),
    _tpu("tpu7x", "TPU7x", 1, "tpu7x:2x2x1", "tpu7x-8", (4096, 59)),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 132, "9.0", tensor_memory=0),
    # 128 lanes of 512 columns of 32 bits.
    _gpu("b200", "NVIDIA B200", 148, "10.0", tensor_memory=128 * 512 * 4),
)

TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}


def find(name: str) -> Target:
    """Returns the target called `name`.

    Raises:
      ValueError: if there is none; it lists those there are.
    """
    if name not in TARGETS:
        raise ValueError(f"there is no target {name!r}; known are {', '.join(TARGETS)}")
    return TARGETS[name]
