"""The primitive's rules, one module for each transformation; importing this registers them all."""

from cokernel.rules import discharge as discharge
