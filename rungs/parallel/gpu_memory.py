"""The share of each GPU's memory that JAX takes when it starts.

JAX takes 75% (https://docs.jax.dev/en/latest/gpu_memory_allocation.html), which leaves 21 GB of an
H100 unused. Not all of it can be JAX's: CUDA's context, the workspaces of cuBLAS and cuDNN, and
NCCL's buffers are outside of what it takes. NVIDIA recommends 0.8 or 0.9
(https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance); 0.9 leaves 8.5 GB of an
H100 and 2.5 GB of a card with 24 GiB.

Loads without JAX.
"""

import os

DEFAULT_SHARE = 0.9
"""Unless one of `SHARE_VARIABLES` is set."""
SHARE_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's names, the old one last. It refuses to start if both are set."""


def set_share() -> None:
    """Make JAX take `DEFAULT_SHARE` of each GPU, unless the user chose another share. It has no
    effect once JAX has started."""
    if _given() is None:
        os.environ[SHARE_VARIABLES[0]] = str(DEFAULT_SHARE)


def share() -> float:
    """Return the share that training takes of a GPU's memory."""
    try:
        given = float(_given() or DEFAULT_SHARE)
    except ValueError:
        return DEFAULT_SHARE
    return given if 0 < given <= 1 else DEFAULT_SHARE


def share_advice(memory: str) -> str:
    """Say how much of a GPU's memory JAX takes, and what changes that."""
    return f"JAX takes {share():.0%} of {memory}; {SHARE_VARIABLES[0]} changes that"


def _given() -> str | None:
    """Return the user's own share; an empty variable counts as none, as in JAX."""
    return next((os.environ[name] for name in SHARE_VARIABLES if os.environ.get(name)), None)
