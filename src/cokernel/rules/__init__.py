"""The primitive's rules, one module for each transformation; importing this registers them all."""

import pathlib

from cokernel import _jax
from cokernel.rules import batching as batching
from cokernel.rules import dce as dce
from cokernel.rules import discharge as discharge
from cokernel.rules import hijax as hijax
from cokernel.rules import jvp as jvp
from cokernel.rules import printing as printing
from cokernel.rules import remat as remat

# A message of JAX that names a line shall name the user's, and not one of these.
_jax.exclude_from_sources(str(pathlib.Path(__file__).parent))
