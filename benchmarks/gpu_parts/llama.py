"""The step of a Llama of 1.1 billion parameters."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.one_step import train_config
from rungs.checks.device import on_mesh
from rungs.checks.device_step import RunningStep, StepTime
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import jax_setup
from rungs.parallel.sharding import one_device
from rungs.planning.hardware import device_of_kind

LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "context_length": 2048,
    "emb_dim": 2048,
    "n_layers": 16,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_dim": 8192,
    "positions": "rope",
    "norm": "rms_norm",
    "feed_forward": "swiglu",
    "attention_output_bias": False,
    "ffn_bias": False,
}
TINY = {
    "vocab_size": 512,
    "context_length": 64,
    "emb_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 128,
}
MICROBATCH = 8
TURNS = 3


def figures(setting: Setting) -> Iterator[Figure]:
    return step_figures(setting, {})


def step_figures(setting: Setting, changes: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures of the step with some keys of `train.json` changed."""
    model = ModelConfig.model_validate(LLAMA | (TINY if setting.rehearse else {}))
    alone = ShardingConfig(mode="dp", data=1)
    train = train_config(1 if setting.rehearse else MICROBATCH, 1, alone)
    run = RunConfig(model, train.model_copy(update={"remat": "activations"} | changes))
    jax_setup.prepare(run.train, lambda: 0)
    mesh = one_device()
    run = on_mesh(run, mesh)
    step = RunningStep.create(run, mesh)
    yield Figure("compiling", [step.compile_seconds], "s")
    yield Figure("memory, as compiled", [step.compiled_bytes() / 1e9], "GB")
    times = [StepTime(step) for _ in range(1 if setting.rehearse else TURNS)]
    hardware = device_of_kind(mesh.devices.flat[0].device_kind)
    peak = hardware.flops if hardware else None
    rates = [time.tokens_per_second for time in times]
    flops = statistics.median(time.model_flops for time in times)
    share = f"{flops / peak:.1%} of the published peak" if peak else ""
    yield Figure("a step", [1e3 * time.seconds for time in times], "ms", share)
    yield Figure("training", rates, "tokens/s", f"{run.tokens_per_step:,} tokens a step")
