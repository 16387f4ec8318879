"""Names of mesh axes, of array axes, of parts of the model, and of parameters."""

from typing import Any

DATA, CONTEXT, TENSOR = "data", "context", "tensor"
"""The mesh axes. A mesh has `DATA`, and one of the other two."""
TOKEN_AXES = (DATA, CONTEXT)
"""The mesh axes along which devices have different tokens: sequences, or parts of sequences."""
BLOCKS, HEAD, TOKEN_EMBEDDING = "blocks", "head", "token_embedding"
"""First parts of paths of parameters: stacked layers, output head, token embedding."""
VOCABULARY = "vocab"
"""The array axis that is padded to fit the mesh."""
POSITION = "position"
"""The array axis of learned positions."""


def dotted(path: tuple[Any, ...]) -> str:
    """Return the name that checkpoints use for a path of `nnx.to_flat_state`."""
    return ".".join(str(part) for part in path)
