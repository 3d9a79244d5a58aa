"""Every private JAX name that Cokernel uses, in the one module that may import `jax._src`.

A new JAX release breaks Cokernel here or not at all: `tests/test_jax_names.py` reads this list and
imports each name on its own. Names are grouped by what they are for, and sorted within a group.
"""

# Names are grouped by purpose, which an import sorter would undo; and nothing here is used here.
# ruff: noqa: F401, I001

from typing import Any

# Tracing and jaxprs
from jax._src.api_util import debug_info
from jax._src.core import AbstractValue
from jax._src.core import DropVar
from jax._src.core import Jaxpr
from jax._src.core import Literal
from jax._src.core import ManualAxisType
from jax._src.core import MemorySpace as ArrayMemorySpace
from jax._src.core import Primitive
from jax._src.core import Ref
from jax._src.core import ShapedArray
from jax._src.core import Tracer
from jax._src.core import Var
from jax._src.core import _pp_eqn as print_equation
from jax._src.core import check_jaxpr
from jax._src.core import custom_typechecks
from jax._src.core import eval_jaxpr
from jax._src.core import extend_axis_env_nd
from jax._src.core import get_axis_env
from jax._src.core import get_referent
from jax._src.core import is_constant_shape
from jax._src.core import jaxpr_as_fun
from jax._src.core import new_jaxpr_eqn
from jax._src.core import jaxprs_in_params
from jax._src.core import pp_eqn_rules
from jax._src.core import resolve_input_effects
from jax._src.core import trace_state_clean
from jax._src.xla_bridge import backends_are_initialized
from jax._src.dispatch import apply_primitive
from jax._src.dtypes import itemsize_bits
from jax._src.flattree import FlatTree
from jax._src.flattree import flatten as flatten_to_tree
from jax._src.flattree import nones as flat_tree_of_nothing
from jax._src.flattree import pack as pack_flat_trees
from jax._src import pjit as pjit_module
from jax._src.interpreters.pxla import ExecuteReplicated
from jax._src.interpreters.pxla import MeshExecutable
from jax._src.interpreters.partial_eval import trace_to_jaxpr
from jax._src.lax.parallel import axis_index_p
from jax._src.literals import TypedComplex
from jax._src.literals import TypedFloat
from jax._src.literals import TypedInt
from jax._src.source_info_util import is_user_filename
from jax._src.source_info_util import new_source_info
from jax._src.source_info_util import register_exclusion as exclude_from_sources
from jax._src.source_info_util import summarize as summarize_source
from jax._src.tree_util import tracing_registry
from jax._src.util import weakref_lru_cache
from jax._src.xla_metadata import clear_xla_metadata

# Effects
from jax._src.core import NamedAxisEffect
from jax._src.effects import JaxprInputEffect
from jax._src.pallas.core import CommsEffect
from jax._src.pallas.core import comms_effect
from jax._src.pallas.core import kernel_local_effects

# Refs
from jax._src.state.discharge import constrain as constrain_memory_space
from jax._src.state.discharge import discharge_state
from jax._src.state.discharge import discharged_aval
from jax._src.state.discharge import register_discharge_rule
from jax._src.state.discharge import run_state
from jax._src.state.primitives import with_memory_space_constraint
from jax._src.state.types import AbstractRef
from jax._src.state.types import AccumEffect
from jax._src.state.types import ReadEffect
from jax._src.state.types import TransformedRef
from jax._src.state.types import WriteEffect

# Pallas
from jax._src.pallas.core import CoreMemorySpace
from jax._src.pallas.core import CostEstimate
from jax._src.pallas.core import MemoryRef
from jax._src.pallas.core import MemorySpace as PallasMemorySpace
from jax._src.pallas.core import Mesh
from jax._src.pallas.core import _convert_out_shape_to_aval as convert_out_type_to_aval
from jax._src.pallas.core import axis_frame
from jax._src.pallas.core import get_interpret_effects
from jax._src.pallas.core import get_memory_space_aval
from jax._src.pallas.core import tracing_grid_env
from jax._src.pallas.mosaic.core import AccMemorySpace
from jax._src.pallas.mosaic.core import CompilerParams as TpuCompilerParams
from jax._src.pallas.mosaic.core import MemorySpace as TpuMemorySpace
from jax._src.pallas.mosaic.core import SideEffectType
from jax._src.pallas.mosaic.core import TensorCoreMesh
from jax._src.pallas.mosaic.interpret.params import SharedInterpretParams
from jax._src.pallas.mosaic.pipeline import emit_pipeline_p
from jax._src.pallas.mosaic.pipeline import emit_pipeline_to_jaxpr
from jax._src.pallas.mosaic.pipeline import pipeline_body_p
from jax._src.pallas.mosaic.pipeline import __file__ as pipeline_file
from jax._src.pallas.mosaic.sc_core import ScalarSubcoreMesh
from jax._src.pallas.mosaic.sc_core import VectorSubcoreMesh

# Chip descriptions
from jax._src import tpu_info
from jax._src.lib import _jax as jaxlib_extension
from jax._src.tpu_info import ChipVersion
from jax._src.tpu_info import get_tpu_info_for_chip

# Configuration
from jax._src import config
from jax._src.config import config_ext
from jax._src.frozen_dict import FrozenDict

# Lowering
from jax._src.compiler import get_compile_options
from jax._src.interpreters import mlir
from jax._src.interpreters.mlir import register_lowering
from jax._src.interpreters.mlir import _lowerings as common_lowerings
from jax._src.interpreters.mlir import _platform_specific_lowerings as platform_lowerings
from jax._src.pallas.mpmd import mpmd_map as stock_mpmd_map
from jax._src.pallas import mpmd as stock_mpmd
from jax._src.pallas.mpmd import mpmd_map_p as stock_mpmd_map_p

# Transformations
from jax._src.interpreters import ad
from jax._src.interpreters import batching
from jax._src.interpreters import partial_eval

# Ref transforms
from jax._src.indexing import Slice
from jax._src.pallas.mosaic.core import AccessAssumptionTransform
from jax._src.pallas.mosaic.sc_core import Indices
from jax._src.pallas.mosaic.sc_core import SharedMemRefSliceTransform
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import BitcastTransform
from jax._src.state.types import MemorySpaceCastTransform
from jax._src.state.types import ReshapeTransform
from jax._src.state.types import SelectTransform
from jax._src.state.types import TransposeTransform
from jax._src.state.utils import eval_bitcast_shape

# Semaphores
from jax._src.pallas.core import AbstractSemaphoreTy

# Primitives of Refs, control flow and calls
from jax._src.ad_checkpoint import name_p
from jax._src.ad_checkpoint import remat_p
from jax._src.core import closed_call_p
from jax._src.core import empty_ref_p
from jax._src.core import freeze_p
from jax._src.core import ref_p
from jax._src.core import stage_p
from jax._src.custom_batching import custom_vmap_p
from jax._src.custom_derivatives import custom_jvp_call_p
from jax._src.custom_derivatives import custom_vjp_call_p
from jax._src.dispatch import device_put_p
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.conditionals import platform_index_p
from jax._src.lax.control_flow.loops import scan_p
from jax._src.lax.control_flow.loops import while_p
from jax._src.lax.lax import composite_p
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic import primitives as tpu_primitives
from jax._src.pallas.mosaic import sc_primitives
from jax._src.named_sharding import UNSPECIFIED
from jax._src.pallas.einshape import _einshape as einshape_by_parts
from jax._src.pallas.einshape import einshape_lo_p as einshape_p
from jax._src.pallas.pallas_call import pallas_call_p
from jax._src.pjit import jit_p
from jax._src.pjit import reshard_p
from jax._src.pjit import sharding_constraint_p
from jax._src.source_info_util import raw_frame_to_frame
from jax._src.source_info_util import user_frame
from jax._src.state.discharge import run_state_p
from jax._src.state.primitives import addupdate_p
from jax._src.state.primitives import broadcast_to_p
from jax._src.state.primitives import get_p
from jax._src.state.primitives import swap_p
from jax._src.xla_metadata import xla_metadata_call_p
from jax._src.xla_metadata import xla_metadata_value_p

# Primitives of arithmetic that jax.lax does not export
from jax._src.ad_util import add_jaxvals_p
from jax._src.ad_util import stop_gradient_p
from jax._src.core import pvary_p
from jax._src.core import reduced_vary_cast_p
from jax._src.lax.lax import dce_sink_p
from jax._src.lax.lax import empty_p
from jax._src.lax.lax import tie_p
from jax._src.lax.lax import _ragged_dot_general_impl as ragged_dot_general_impl
from jax._src.lax.lax import ragged_dot_general_p
from jax._src.lax import special

# Debugging and callbacks
from jax._src.callback import io_callback_p
from jax._src.callback import pure_callback_p
from jax._src.checkify import check_p
from jax._src.debugging import debug_callback_p
from jax._src.debugging import debug_print_p
from jax._src.debugging import merge_callback_args
from jax._src.pallas.core import debug_checks_enabled

# Clients of XLA
from jax._src.lib import xla_client

# Random numbers
from jax._src.core import physical_aval
from jax._src.pallas.mosaic.random import tpu_key_impl as pallas_key_impl
from jax._src.random import prng
from jax._src.random.core import random_clone_p, random_gamma_p
from jax._src.random.prng import KeyTy
from jax._src.random.threefry2x32 import threefry2x32_p


def gpu_interpreter() -> Any:
    """Returns the state of JAX's GPU interpreter, whose import takes long and is rarely needed."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks
