"""The planned communication of a step, against hand-computed numbers and its compiled program."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.objectives.table import make_train_step
from rungs.parallel.target_device import Target, trace_for
from rungs.planning.communication import (
    PlannedCollective,
    abstract_layout,
    communication_of,
    planned_collectives,
)
from rungs.planning.hardware import Links
from rungs.planning.program import collectives, summary
from rungs.step.state import AbstractState
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.sharded_models import RECIPE

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
ARCHITECTURES["recipe"] = {**RECIPE, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 32}
ARCHITECTURES["olmo"] = {
    **ARCHITECTURES["llama"],
    **{"norm_placement": "output", "qk_norm": True, "qk_norm_scope": "all_heads"},
}
ARCHITECTURES["gemma"] = {
    **ARCHITECTURES["llama"],
    "n_layers": 4,  # a layer after the last period would be gathered once, outside the loop
    "norm_placement": "around",
    "qk_norm": True,
    "sliding_window": 3,
    "layer_pattern": ["sliding", "global"],
}


def run_of(architecture: str, mode: Mode, data: int, last: int, **train: Any) -> RunConfig:
    """Two sequences on each device along the data axis."""
    sharding = ShardingConfig.of(mode, (data, last)).model_dump()
    settings = {"microbatch_size": 2 * data, "clipping_max_norm": 1.0, "sharding": sharding}
    model = model_config(**SMALL | ARCHITECTURES[architecture])
    return RunConfig(model, train_config(**settings | train))


def planned(run: RunConfig) -> list[PlannedCollective]:
    assert run.train.sharding is not None
    return planned_collectives(run, abstract_layout(run.train.sharding))


def in_float16(run: RunConfig) -> RunConfig:
    """Return the run in float16: XLA's CPU compiler sends bfloat16 as float32, but not float16."""
    return run._replace(train=run.train.model_copy(update={"compute_dtype": "float16"}))


def bytes_in_program(run: RunConfig) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return the bytes that the compiled step sends, by kind and mesh axes."""
    assert run.train.sharding is not None
    mesh = mesh_of(*run.train.sharding.sizes, run.train.sharding.mode)
    state = AbstractState(run, 10, mesh)
    model, optimizer = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    shape = (run.train.gradient_accumulation_steps, run.train.microbatch_size, LENGTH)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = make_train_step(run.train, mesh).lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    return {(one.kind, one.axes): one.moved_bytes for one in summary(collectives(compiled), mesh)}


def check_close(
    found: dict[tuple[str, tuple[str, ...]], int], expected: Counter[tuple[str, tuple[str, ...]]]
) -> None:
    """Check that no more than small sums, which the plan leaves out, differ."""
    small = 0.02 * sum(expected.values())
    for key in found.keys() | expected.keys():
        assert found.get(key, 0) == pytest.approx(expected[key], rel=0.1, abs=small), key


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "mode", "mesh", "train"),
    [
        ("llama", "fsdp_tp", (2, 4), {"gradient_accumulation_steps": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("llama", "dp", (8, 1), {}),
                ("llama", "fsdp", (8, 1), {"gradient_accumulation_steps": 2}),
                ("llama", "tp", (1, 8), {"gradient_accumulation_steps": 2}),
                ("gpt2", "fsdp_tp", (4, 2), {"clipping_max_norm": None}),
                ("gemma", "fsdp_tp", (2, 4), {"remat": "full"}),
                ("experts", "fsdp_tp", (2, 4), {"gradient_accumulation_steps": 2}),
                ("gpt2", "cp", (1, 8), {"remat": "none"}),
                ("llama", "cp", (2, 4), {"gradient_accumulation_steps": 2}),
                ("gemma", "cp", (1, 8), {"remat": "full"}),
                ("olmo", "fsdp_tp", (2, 2), {"remat": "full"}),
                ("olmo", "tp", (1, 4), {}),
                ("recipe", "dp", (8, 1), {}),
                ("recipe", "fsdp", (8, 1), {"gradient_accumulation_steps": 2}),
                ("recipe", "fsdp_tp", (4, 2), {"remat": "full"}),
                ("experts", "cp", (2, 2), {"gradient_accumulation_steps": 2}),
            )
        ),
    ],
)
def test_the_compiled_step_sends_what_is_planned(
    architecture: str, mode: Mode, mesh: tuple[int, int], train: dict[str, Any]
) -> None:
    run = in_float16(run_of(architecture, mode, *mesh, **train))
    expected: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in planned(run):
        # XLA's CPU compiler moves these all-gathers out of the loop over microbatches
        times = 1 if one.purpose == "other weights" else one.runs_per_step
        expected[one.kind, one.axes] += one._replace(runs_per_step=times).moved_bytes
    check_close(bytes_in_program(run), expected)


@pytest.mark.parametrize(
    ("architecture", "accumulation"),
    [
        ("gpt2", 1),
        pytest.param("llama", 1, marks=pytest.mark.long),
        pytest.param("gpt2", 2, marks=pytest.mark.long),
    ],
)
def test_on_accelerators_the_compiled_step_of_dp_sends_what_is_planned(
    architecture: str, accumulation: int
) -> None:
    run = run_of(architecture, "dp", 8, 1, gradient_accumulation_steps=accumulation)
    model = run.model.model_copy(update={"vocab_size": 128})  # a tile, so that no device pads it
    expected: Counter[tuple[str, tuple[str, ...]]] = Counter()
    with trace_for(Target("gpu")):
        for one in planned(run._replace(model=model)):
            expected[one.kind, one.axes] += one.moved_bytes
        found = bytes_in_program(run._replace(model=model))
    kinds = {"all-gather", "reduce-scatter", "all-reduce"}
    assert {kind for kind, _ in found} == kinds | ({"all-to-all"} if accumulation == 1 else set())
    check_close(found, expected)


def test_data_parallel_sums_each_gradient_once_per_step() -> None:
    sent = planned(run_of("llama", "dp", 4096, 1, gradient_accumulation_steps=8))
    of_layer = 16 * 2 * (8 + 2) * 2 + 3 * 16 * 32 + 2 * 16  # q, k, v, o; ffn; norms
    weights = 61 * 16 + 3 * of_layer + 16
    gradients = [one for one in sent if one.purpose == "gradients"]
    assert sum(one.array_bytes * one.runs_per_step for one in gradients) == 4 * weights
    assert {(one.kind, one.axes, one.devices) for one in sent} == {("all-reduce", ("data",), 4096)}


def test_fsdp_gathers_twice_and_reduce_scatters_once_per_microbatch() -> None:
    sent = planned(in_float16(run_of("llama", "fsdp", 16, 1, gradient_accumulation_steps=8)))
    matrices = 3 * (16 * 2 * (8 + 2) * 2 + 3 * 16 * 32)
    total: Counter[tuple[str, str]] = Counter()
    for one in sent:
        total[one.purpose, one.kind] += one.runs_per_step * one.array_bytes
    assert total == {
        ("layer weights", "all-gather"): 8 * 2 * (2 * matrices + 4 * 3 * 2 * 16),
        ("other weights", "all-gather"): 8 * (2 * 61 * 16 + 4 * 16),  # the head and a norm
        ("activations", "all-gather"): 8 * 4 * 16 * 2 * LENGTH,  # token ids
        ("activations", "all-to-all"): 8 * 2 * 4 * 2 * LENGTH * 16,  # embedded tokens
        ("gradients", "reduce-scatter"): 8 * 4 * (matrices + 3 * 2 * 16 + 61 * 16 + 16),
    }


def test_cp_exchanges_queries_keys_values_and_results_of_every_layer() -> None:
    run = in_float16(run_of("llama", "cp", 2, 4, gradient_accumulation_steps=3))
    sent = [one for one in planned(run) if one.axes == ("context",)]
    tokens, layers, passes = 2 * LENGTH // 4, 3, 3  # forward, recomputation, backward
    of_head = 2 * tokens * 2
    # 8 query heads, and 2 of keys and values, each for two devices
    assert [one.array_bytes for one in sent] == [8 * of_head, 4 * of_head, 4 * of_head, 8 * of_head]
    assert {(one.axes, one.devices, one.runs_per_step) for one in sent} == {
        (("context",), 4, passes * 3 * layers)
    }
    kept = in_float16(run_of("llama", "cp", 2, 4, remat="none"))
    again = {one.runs_per_step for one in planned(kept) if one.axes == ("context",)}
    assert again == {2 * layers}


def test_cp_waits_for_its_all_to_alls_and_gathers_over_all_devices() -> None:
    run = in_float16(run_of("llama", "cp", 2, 4))
    assert run.train.sharding is not None
    links = Links(island=8, inner=1e9, outer=None)
    found = communication_of(run, abstract_layout(run.train.sharding), links)
    exchanged = sum(one.moved_bytes for one in planned(run) if one.kind == "all-to-all")
    gathered = [one for one in planned(run) if one.kind in ("all-gather", "reduce-scatter")]
    assert {(one.axes, one.devices) for one in gathered} == {(("data", "context"), 8)}
    assert found.tensor == pytest.approx(exchanged / 1e9)
    rest = sum(one.moved_bytes for one in planned(run)) - exchanged
    assert found.data == pytest.approx(rest / 1e9)


def test_fsdp_sends_no_table_of_embeddings_that_is_only_looked_up() -> None:
    sent = planned(run_of("gpt2", "fsdp", 16, 1))
    largest = max(one.array_bytes for one in sent if one.purpose == "other weights")
    assert largest == 4 * 61 * 16  # the head, in float32
    tables = [one for one in sent if one.array_bytes == largest]
    assert Counter(one.kind for one in tables) == {"all-gather": 1, "reduce-scatter": 1}


def test_one_device_sends_nothing() -> None:
    run = run_of("llama", "dp", 1, 1)
    assert planned(run) == []


def test_lora_is_rejected() -> None:
    lora = {"rank": 2, "alpha": 2, "targets": ["query"]}
    run = run_of("llama", "dp", 2, 1, lora=lora, start_from="imported")
    with pytest.raises(ValueError, match="lora"):
        planned(run)
