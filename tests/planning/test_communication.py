"""What a step sends on paper, against numbers by hand and against its compiled program."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rungs.config.run_config import RunConfig
from rungs.config.train_config import Mode
from rungs.planning.communication import Sent, layout_without_devices, traffic
from rungs.planning.compiled_communication import collectives, summary
from rungs.step.state import AbstractState
from rungs.step.train_step import make_train_step
from tests.support.configs import mesh_of, model_config, train_config

LENGTH = 8
SMALL: dict[str, Any] = {"vocab_size": 61, "context_length": LENGTH, "emb_dim": 16, "n_layers": 3}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_heads": 8, "qkv_bias": True},
    "llama": {
        "n_heads": 8,
        "n_kv_heads": 2,
        "ffn_dim": 32,
        "positions": "rope",
        "norm": "rms_norm",
        "feed_forward": "swiglu",
        "attention_output_bias": False,
        "ffn_bias": False,
        "tied_embeddings": True,
    },
    "experts": {
        "n_heads": 8,
        "ffn_dim": 24,
        "feed_forward": "swiglu",
        "n_experts": 4,
        "experts_per_token": 2,
    },
}
ARCHITECTURES["gemma"] = {
    **ARCHITECTURES["llama"],
    "n_layers": 4,  # a layer after the last period would be gathered once, as no loop parts the two
    "norm_placement": "around",
    "qk_norm": True,
    "sliding_window": 3,
    "layer_pattern": ["sliding", "global"],
}


def run_of(architecture: str, mode: Mode, data: int, tensor: int, **train: Any) -> RunConfig:
    """Two sequences on each device along the data axis."""
    sharding = {"mode": mode, "data": data, "tensor": tensor}
    settings = {"microbatch_size": 2 * data, "clipping_max_norm": 1.0, "sharding": sharding}
    model = model_config(**SMALL | ARCHITECTURES[architecture])
    return RunConfig(model, train_config(**settings | train))


def on_paper(run: RunConfig) -> list[Sent]:
    assert run.train.sharding is not None
    return traffic(run, layout_without_devices(run.train.sharding))


def in_float16(run: RunConfig) -> RunConfig:
    """XLA's CPU compiler sends bfloat16 as float32, but float16, which is as wide, as it is."""
    return run._replace(train=run.train.model_copy(update={"compute_dtype": "float16"}))


def bytes_in_program(run: RunConfig) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes by kind and mesh axes that the compiled step sends."""
    assert run.train.sharding is not None
    mesh = mesh_of(*run.train.sharding.sizes)
    state = AbstractState(run, 10, mesh)
    model, optimizer = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    shape = (run.train.gradient_accumulation_steps, run.train.microbatch_size, LENGTH)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = make_train_step(run.train, mesh).lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    return {(one.kind, one.axes): one.moved_bytes for one in summary(collectives(compiled), mesh)}


@pytest.mark.parametrize(
    ("architecture", "mode", "mesh", "train"),
    [
        ("llama", "dp", (8, 1), {}),
        ("llama", "fsdp", (8, 1), {"gradient_accumulation_steps": 2}),
        ("llama", "tp", (1, 8), {"gradient_accumulation_steps": 2}),
        ("llama", "fsdp_tp", (2, 4), {"gradient_accumulation_steps": 2}),
        ("gpt2", "fsdp_tp", (4, 2), {"clipping_max_norm": None}),
        ("gemma", "fsdp_tp", (2, 4), {"remat": "full"}),
        ("experts", "fsdp_tp", (2, 4), {"gradient_accumulation_steps": 2}),
    ],
)
def test_the_compiled_step_sends_what_paper_says(
    architecture: str, mode: Mode, mesh: tuple[int, int], train: dict[str, Any]
) -> None:
    run = in_float16(run_of(architecture, mode, *mesh, **train))
    expected: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in on_paper(run):
        # XLA's CPU compiler gathers these once, before the loop over microbatches
        times = 1 if one.purpose == "other weights" else one.times
        expected[one.kind, one.axes] += one._replace(times=times).moved_bytes
    assert bytes_in_program(run) == dict(expected)


def test_float32_takes_four_bytes_in_both_directions() -> None:
    run = run_of("llama", "tp", 1, 2)
    activations = [one for one in on_paper(run) if one.purpose == "activations"]
    stream, tokens = 2 * LENGTH * 16 * 4, 2 * LENGTH * 4
    assert sum(one.times * one.whole_bytes for one in activations) == 14 * stream + 3 * tokens
    assert bytes_in_program(run)["all-reduce", ("tensor",)] == sum(
        one.moved_bytes for one in on_paper(run) if one.axes == ("tensor",)
    )


def test_data_parallel_sums_each_gradient_once_a_step() -> None:
    sent = on_paper(run_of("llama", "dp", 4096, 1, gradient_accumulation_steps=8))
    of_layer = 16 * 2 * (8 + 2) * 2 + 3 * 16 * 32 + 2 * 16  # q, k, v, o; ffn; norms
    weights = 61 * 16 + 3 * of_layer + 16
    gradients = [one for one in sent if one.purpose == "gradients"]
    assert sum(one.whole_bytes * one.times for one in gradients) == 4 * weights
    assert {(one.kind, one.axes, one.devices) for one in sent} == {("all-reduce", ("data",), 4096)}


def test_parts_are_gathered_twice_and_handed_out_once_for_each_microbatch() -> None:
    sent = on_paper(in_float16(run_of("llama", "fsdp", 16, 1, gradient_accumulation_steps=8)))
    matrices = 3 * (16 * 2 * (8 + 2) * 2 + 3 * 16 * 32)
    whole: Counter[tuple[str, str]] = Counter()
    for one in sent:
        whole[one.purpose, one.kind] += one.times * one.whole_bytes
    del whole["scalars", "all-reduce"]
    assert whole == {
        ("layers' weights", "all-gather"): 8 * 2 * (2 * matrices + 4 * 3 * 2 * 16),
        ("other weights", "all-gather"): 8 * 4 * (61 * 16 + 16),
        ("gradients", "reduce-scatter"): 8 * 4 * (matrices + 3 * 2 * 16 + 61 * 16 + 16),
    }


def test_one_device_sends_nothing() -> None:
    run = run_of("llama", "dp", 1, 1)
    assert on_paper(run) == []


def test_low_rank_additions_are_refused() -> None:
    lora = {"rank": 2, "alpha": 2, "targets": ["query"]}
    run = run_of("llama", "dp", 2, 1, lora=lora, start_from="imported")
    with pytest.raises(ValueError, match="lora"):
        on_paper(run)
