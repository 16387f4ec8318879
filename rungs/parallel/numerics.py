"""Settings outside of a run's files that bear on its results: flags of XLA, variables of JAX, and
the kind of device. A checkpoint records them; resuming says which have changed."""

import os

import jax

from rungs.common.errors import UserError
from rungs.parallel import gpu_settings

SETTINGS = (
    *("jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_threefry_gpu_kernel_lowering", "jax_random_seed_offset", "jax_softmax_custom_jvp"),
    *("jax_high_dynamic_range_gumbel", "jax_allow_f16_reductions", "jax_use_shardy_partitioner"),
    *("jax_disable_most_optimizations", "jax_optimization_level", "jax_memory_fitting_level"),
    *("jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_use_direct_linearize"),
    *("jax_compiler_enable_remat_pass", "jax_ragged_dot_use_ragged_dot_instruction"),
)
"""Names in `jax.config`; the environment variables have the same names in capitals."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_OTHER_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
_HARMLESS_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
_GIVEN = {name: os.environ.get(name, "") for name in (*_FLAGS, *_OTHER_VARIABLES)}
"""Values that the user has set, before `jax_setup` adds its own flags."""
_NEEDED = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_no_execution": False,
    "jax_no_tracing": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}
"""Settings that Rungs needs: its dtypes have at most 32 bits, and are mixed."""


def refuse_unusable() -> None:
    """Raise UserError with a line for each variable with which Rungs doesn't work."""
    lines = [
        f"{name.upper()}: Rungs works only with the default, {needed}; unset it"
        for name, needed in _NEEDED.items()
        if jax.config.values.get(name, needed) != needed
    ]
    lines += [
        f"XLA_FLAGS: the installed XLA has no flag {name}; remove it"
        for name in gpu_settings.unknown_flags()
    ]
    if lines:
        raise UserError("\n".join(lines))


def recorded() -> dict[str, str]:
    """Return all settings by name. Starts JAX."""
    flags = {
        name: " ".join(sorted(f for f in _GIVEN[name].split() if not f.startswith(_HARMLESS_FLAGS)))
        for name in _FLAGS
    }
    values = {name.upper(): str(jax.config.values.get(name)) for name in SETTINGS}
    others = {name: _GIVEN[name] for name in _OTHER_VARIABLES}
    return {"device": jax.devices()[0].device_kind} | flags | others | values


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return what differs between two records, of what both have."""
    return [
        f"{name} was {before[name] or 'not set'}, is now {now[name] or 'not set'}"
        for name in now
        if name in before and before[name] != now[name]
    ]
