"""Names of mesh axes, of array axes, of parts of the model, and of parameters."""

from typing import Any

DATA, TENSOR = "data", "tensor"
"""The mesh axes."""
BLOCKS, HEAD = "blocks", "head"
"""First part of the path of the stacked layers' parameters, and of the output head's."""
VOCABULARY = "vocab"
"""The array axis that is padded to fit the mesh."""


def dotted(path: tuple[Any, ...]) -> str:
    """Return the name that checkpoints use for a path of `nnx.to_flat_state`."""
    return ".".join(str(part) for part in path)
