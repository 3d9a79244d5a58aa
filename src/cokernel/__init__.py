"""Cokernel: kernels of several cooperating programs, written in Pallas, run natively anywhere."""

from cokernel import lowering as lowering
from cokernel import rules as rules
from cokernel.meshes import CoreMesh as CoreMesh
from cokernel.meshes import private as private
from cokernel.meshes import set_target as set_target
from cokernel.meshes import shared as shared
from cokernel.meshes import target as target
from cokernel.parameters import CompilerParams as CompilerParams
from cokernel.statistics import LaunchStatistics as LaunchStatistics
from cokernel.statistics import ProgramStatistics as ProgramStatistics
from cokernel.statistics import last_launch as last_launch
from cokernel.tracing import kernel as kernel
from cokernel.tracing import mpmd_map as mpmd_map

lowering.register_call_targets()

__all__ = [
    "CompilerParams",
    "CoreMesh",
    "LaunchStatistics",
    "ProgramStatistics",
    "kernel",
    "last_launch",
    "mpmd_map",
    "private",
    "set_target",
    "shared",
    "target",
]
