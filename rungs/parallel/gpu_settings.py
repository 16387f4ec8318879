"""GPU settings before JAX starts: its share of GPU memory, and flags of XLA's compiler that overlap
computation with transfers of weights. Imports no JAX; `XLA_FLAGS` in the environment overrides any
flag, and docs/performance.md has their effects.

By default JAX takes 75% (https://docs.jax.dev/en/latest/gpu_memory_allocation.html), which leaves
21 GB of an H100 unused. CUDA's context, the workspaces of cuBLAS and cuDNN, and NCCL's buffers need
the rest. NVIDIA recommends 0.8 or 0.9
(https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance); 0.9 leaves 8.5 GB of an
H100 and 2.5 GB of a card with 24 GiB."""

import functools
import importlib.metadata
import importlib.util
import mmap
import os
import re
import tomllib
from pathlib import Path

DEFAULT_SHARE = 0.9
"""Share of each GPU's memory that JAX takes unless one of `SHARE_VARIABLES` is set."""
SHARE_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's names for the share, the old one last. JAX refuses to start with both."""
FlagValue = bool | int | str
_FLAGS = tomllib.loads(Path(__file__).with_name("gpu_flags.toml").read_text("utf-8"))
COMMON_FLAGS: dict[str, FlagValue] = _FLAGS["common"]
PIPELINING_FLAGS: dict[str, FlagValue] = _FLAGS["one_microbatch"]
FLOAT8_FLAGS: dict[str, FlagValue] = _FLAGS["float8"]
FORMER_NAMES: dict[str, str] = _FLAGS["former_names"]
_AS_OPTION: dict[FlagValue, FlagValue] = {"on": "COLLECTIVE_PIPELINING_MODE_ON"}
"""Values that are written differently as options of `jax.stages.Lowered.compile`."""
_LIBRARY = "libjax_common.so"
_PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"


def set_memory_share() -> None:
    """Make JAX take `DEFAULT_SHARE` of each GPU unless the user chose. Call before JAX starts."""
    if _given_share() is None:
        os.environ[SHARE_VARIABLES[0]] = str(DEFAULT_SHARE)


def memory_share() -> float:
    """Return the share of a GPU's memory that training takes."""
    return float(_given_share() or DEFAULT_SHARE)


def share_advice(memory: str) -> str:
    """Say how much of a GPU's memory JAX takes, and how to change that."""
    return f"JAX takes {memory_share():.0%} of {memory}; {SHARE_VARIABLES[0]} changes that"


def _given_share() -> str | None:
    """Return the user's own share; as in JAX, an empty variable counts as none."""
    return next((os.environ[name] for name in SHARE_VARIABLES if os.environ.get(name)), None)


def set_gpu_flags(microbatches: int, float8: bool = False) -> None:
    """Add the flags to `XLA_FLAGS`, if there is a GPU plugin. Call it before JAX starts. Flags that
    the installed XLA lacks are left out, as it would end the process."""
    if libraries := _libraries():
        flags = [
            f"--{name}={str(value).lower()}"
            for name, value in gpu_flags(microbatches, float8).items()
            if all(_contains(path, name) for path in libraries)
        ]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def disable_graphs() -> None:
    """Make GPUs launch each kernel on its own, as JAX's profiler doesn't see inside CUDA graphs.
    Call before JAX starts."""
    if _libraries():
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()


def gpu_options(microbatches: int, float8: bool = False) -> dict[str, FlagValue]:
    """Return the flags as options of `jax.stages.Lowered.compile`."""
    flags = gpu_flags(microbatches, float8)
    return {name: _AS_OPTION.get(value, value) for name, value in flags.items()}


def gpu_flags(microbatches: int, float8: bool = False) -> dict[str, FlagValue]:
    """Return the flags for a step of this many microbatches, without those set by the user."""
    flags = COMMON_FLAGS if microbatches > 1 else COMMON_FLAGS | PIPELINING_FLAGS
    flags = flags | FLOAT8_FLAGS if float8 else flags
    if _jaxlib_version() < (0, 11, 1):
        former = {FORMER_NAMES[name]: True for name in flags if name in FORMER_NAMES}
        flags = former | {name: flags[name] for name in flags if name not in FORMER_NAMES}
    given = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in flags.items() if name not in given}


def _jaxlib_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3]))


def _libraries() -> list[Path]:
    """Return the libraries that read the flags; none without a GPU plugin."""
    plugins = [path for name in _PLUGINS for path in _files_of(name, "xla_cuda_plugin.so")]
    return plugins and [*plugins, *_files_of("jaxlib", _LIBRARY)]


def _files_of(package: str, name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing
        return []
    folders = spec.submodule_search_locations if spec else None
    return [path for folder in folders or () if (path := Path(folder) / name).exists()]


@functools.cache
def _contains(path: Path, text: str) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text.encode()) >= 0
