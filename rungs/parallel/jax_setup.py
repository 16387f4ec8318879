"""Set up JAX before it starts: compilation cache, memory, compiler flags, virtual CPU devices,
determinism. Imports nothing that starts a backend, after which these settings have no effect."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rungs.common import machine, paths
from rungs.common.errors import UserError
from rungs.common.run_log import log
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import devices, gpu_settings

TRUNCATED_ENTRY = r"Error reading persistent compilation cache entry for '(.+?)'"
WRITE_FAILURE = r"Error writing persistent compilation cache entry for '.+?': (.*)"
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def prepare(
    train: OptimizationConfig,
    copy_bytes: Callable[[], int],
    recorded: ShardingConfig | None = None,
    processes: int = 1,
) -> None:
    """Set JAX up for a run; arguments as for `cpu_device_count`."""
    enable_compilation_cache()
    keep_freed_memory()
    gpu_settings.set_memory_share()
    gpu_settings.set_gpu_flags(train.microbatches_per_step, train.uses_float8)
    if train.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    with contextlib.suppress(RuntimeError):  # JAX has already started
        count = devices.cpu_device_count(train, copy_bytes, recorded, processes)
        jax.config.update("jax_num_cpu_devices", count)


def settle(platform: str) -> None:
    """Undo settings that only help on a CPU, once JAX has chosen a platform: cpu, gpu or tpu."""
    if platform != "cpu":
        machine.set_malloc(arena_max=0, mmap_max=65_536, trim_threshold=128 * 1024)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory between steps. Otherwise, on a CPU, each step maps and zeroes
    its memory again, which took a fifth of the step. It must be set before JAX starts its threads;
    for accelerators `settle` undoes it, as it would keep every checkpoint copy's memory."""
    machine.set_malloc(arena_max=1, mmap_max=0, trim_threshold=-1)


def enable_compilation_cache() -> None:
    """Keep compiled code between starts, in the folder of JAX's environment variable or the user's
    cache folder. Raises UserError if an environment variable asks for something unsupported."""
    refuse_unusable()
    cache = paths.cache_folder()
    place = os.environ.get(CACHE_VARIABLE) or (cache and cache / "compiled")
    if place is None:
        log.warning("no cache folder of the user: compiled code isn't kept; set %s", CACHE_VARIABLE)
        return
    folder = Path(place)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _handle_cache_failures(folder)


def _handle_cache_failures(folder: Path) -> None:
    """Intercept JAX's warnings about the compilation cache; JAX then compiles without it. Entries
    truncated by a kill are deleted, as JAX never overwrites an entry and would warn at every start.
    A failed write is a warning in the log."""
    show = warnings.showwarning

    def show_or_handle(message: Any, *args: Any, **kwargs: Any) -> None:
        if truncated := re.match(TRUNCATED_ENTRY, str(message)):
            with contextlib.suppress(OSError):
                for entry in folder.glob(f"{truncated[1]}-*"):
                    entry.unlink(missing_ok=True)
        elif failed := re.match(WRITE_FAILURE, str(message), re.DOTALL):
            log.warning("%s: cannot write the compilation cache: %s", folder, failed[1])
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = show_or_handle


SETTINGS = (
    *("jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_threefry_gpu_kernel_lowering", "jax_random_seed_offset", "jax_softmax_custom_jvp"),
    *("jax_high_dynamic_range_gumbel", "jax_allow_f16_reductions", "jax_use_shardy_partitioner"),
    *("jax_disable_most_optimizations", "jax_optimization_level", "jax_memory_fitting_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_use_direct_linearize"),
    *("jax_compiler_enable_remat_pass", "jax_ragged_dot_use_ragged_dot_instruction"),
    *("jax_accurate_erf_inv", "jax_use_hlo_logistic_lowering"),
)
"""Names in `jax.config`, not all of them in each version; in capitals they are environment
variables."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OTHER_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
_HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
_GIVEN = {name: os.environ.get(name, "") for name in (*_FLAGS, *_OTHER_VARIABLES)}
"""The user's values, before `jax_setup` adds its own flags."""
_NEEDED = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_no_execution": False,
    "jax_no_tracing": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_transfer_guard": None,
    "jax_transfer_guard_host_to_device": None,
    "jax_transfer_guard_device_to_host": None,
    "jax_transfer_guard_device_to_device": None,
}
"""Required settings: Rungs mixes dtypes of at most 32 bits, moves arrays without saying so, and
leaves out NaN by itself."""


def refuse_unusable() -> None:
    """Raise UserError with a line for each variable that Rungs doesn't work with."""
    wrong = [
        name for name, needed in _NEEDED.items() if jax.config.values.get(name, needed) != needed
    ]
    lines = [
        f"{name.upper()}: Rungs works only with the default, {_NEEDED[name]}; unset it"
        for name in wrong
        if not any(name.startswith(f"{other}_") for other in wrong)  # JAX sets it with the other
    ]
    if lines:
        raise UserError("\n".join(lines))


def recorded() -> dict[str, str]:
    """Return all settings by name. Starts JAX."""
    flags = {
        name: " ".join(sorted(f for f in _GIVEN[name].split() if not f.startswith(_HARMLESS_FLAGS)))
        for name in _FLAGS
    }
    known = jax.config.values
    values = {name.upper(): str(known[name]) for name in SETTINGS if name in known}
    others = {name: _GIVEN[name] for name in _OTHER_VARIABLES}
    return {"device": jax.devices()[0].device_kind} | flags | others | values


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the differences between two records, for settings in both."""
    return [
        f"{name} was {before[name] or 'not set'}, is now {now[name] or 'not set'}"
        for name in now
        if name in before and before[name] != now[name]
    ]
