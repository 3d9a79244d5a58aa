"""The text of the error that a failed launch raises."""

from collections.abc import Mapping, Sequence
from typing import Any


def describe(
    failure: Mapping[str, Any], sites: Sequence[Mapping[str, Any]], memory: Mapping[str, Any]
) -> str:
    """The text of a failure (see `Failure` in `_runtime.pyi`)."""
    return f"{failure['kind']}: {dict(failure)}"
