"""Flags of XLA's GPU compiler, so that devices compute while they send each other weights.

They are for steps of one microbatch. With several, the compiler also pipelines the loop over
microbatches and has the activations of two of them in memory. `XLA_FLAGS` in the environment
overrides any flag. docs/performance.md says what they bring.
"""

import importlib.util
import mmap
import os
import re
from pathlib import Path

Value = bool | int | str
GPU_FLAGS: dict[str, Value] = {
    # The loop over layers gathers the weights of the next layer while it computes one, and adds up
    # the gradients of the layer before. jax 0.10 has the first three names, jax 0.11 the others.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_pipeline_all_gather": "on",
    "xla_gpu_pipeline_all_reduce": "on",
    "xla_gpu_pipeline_reduce_scatter": "on",
    # Without it, gathering the next layer waits until the gradients are sent.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    # All weights of a layer of up to 64M parameters are gathered at once, but not the head.
    "xla_gpu_all_gather_combine_threshold_bytes": 128 << 20,
}
"""See also https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance."""
_AS_OPTION = {"on": "COLLECTIVE_PIPELINING_MODE_ON"}
"""How values that are texts are written in options of `jax.stages.Lowered.compile`."""
_PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"


def set_gpu_flags(microbatches: int) -> None:
    """Add the flags to `XLA_FLAGS`, where there is a plugin for GPUs. Call it before JAX starts.

    XLA ends the process if it does not know a flag, so those that the installed version does not
    have are left out.
    """
    if libraries := _libraries():
        flags = [
            f"--{name}={str(value).lower()}"
            for name, value in gpu_flags(microbatches).items()
            if _has(libraries, name)
        ]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def gpu_options(microbatches: int) -> dict[str, Value]:
    """Return the flags as options of the compiler. It refuses those that it doesn't have."""
    flags = gpu_flags(microbatches)
    return {name: _AS_OPTION.get(str(value), value) for name, value in flags.items()}


def gpu_flags(microbatches: int) -> dict[str, Value]:
    """Return the flags for a step of so many microbatches, without those that the user has set."""
    if microbatches > 1:
        return {}
    own = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in GPU_FLAGS.items() if name not in own}


def _libraries() -> list[Path]:
    """Return the libraries that read the flags; none without a plugin for GPUs."""
    plugins = [path for name in _PLUGINS for path in _files_of(name, "xla_cuda_plugin.so")]
    return plugins and [*plugins, *_files_of("jaxlib", "libjax_common.so")]


def _files_of(package: str, name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # there is no parent package
        return []
    folders = spec.submodule_search_locations if spec else None
    return [path for folder in folders or () if (path := Path(folder) / name).exists()]


def _has(libraries: list[Path], flag: str) -> bool:
    return all(_contains(path, flag.encode()) for path in libraries)


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
