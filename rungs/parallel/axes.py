"""Names: of mesh axes, of the parts of a model, and of a parameter by its path."""

from typing import Any

Path = tuple[Any, ...]
"""Where an array is in a module, as `nnx.to_flat_state` gives it."""
DATA, TENSOR = "data", "tensor"
"""The mesh axes."""
BLOCKS, HEAD = "blocks", "head"
"""First part of the path of the stacked layers' arrays, and of the output head's."""
VOCABULARY = "vocab"
"""The array axis that is padded to the mesh."""


def dotted(path: tuple[Any, ...]) -> str:
    """A path of attributes as the name that checkpoints use."""
    return ".".join(str(part) for part in path)
