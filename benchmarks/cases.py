"""All cases, in the order in which they are shown."""

import arithmetic
import movement
import scheduling
from native import COUNT, INT

GROUPS = [scheduling.GROUP, movement.GROUP, arithmetic.GROUP]
CASES = {key: build for group in GROUPS for key, build in group.cases.items()}
SAMPLES = {key: sample for group in GROUPS for key, sample in group.samples.items()}
SIGNATURES = {
    "traffic": [COUNT, COUNT, INT, COUNT],
    "multiply_adds": [COUNT, INT, COUNT],
    **{name: types for group in GROUPS for name, types in group.signatures.items()},
}
