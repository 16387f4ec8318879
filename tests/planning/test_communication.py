"""The planned communication of a step, against hand-computed numbers and its compiled program."""

from collections import Counter
from typing import Any

import pytest

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.parallel.target_device import Target, trace_for
from rungs.planning.communication import (
    PlannedCollective,
    abstract_layout,
    communication_of,
    planned_collectives,
)
from rungs.planning.compiled_step import lower_step
from rungs.planning.hardware import Links
from rungs.planning.program import collectives, summary
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


def by_kind(run: RunConfig) -> Counter[tuple[str, tuple[str, ...]]]:
    """Return the bytes that the planned step sends, by kind and mesh axes."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in planned(run):
        total[one.kind, one.axes] += one.moved_bytes
    return total


def in_float16(run: RunConfig) -> RunConfig:
    """Return the run in float16: XLA's CPU compiler sends bfloat16 as float32, but not float16."""
    return run._replace(train=run.train.model_copy(update={"compute_dtype": "float16"}))


def check_against_the_program(run: RunConfig) -> None:
    """Check that the compiled step sends the same; what a compiler adds or drops is small."""
    assert run.train.sharding is not None
    mesh = mesh_of(*run.train.sharding.sizes, run.train.sharding.mode)
    compiled = lower_step(run, mesh).compile({"xla_backend_optimization_level": 0})
    found = {(one.kind, one.axes): one.moved_bytes for one in summary(collectives(compiled), mesh)}
    expected = by_kind(run)
    small = 0.03 * sum(expected.values())
    for key in found.keys() | expected.keys():
        assert found.get(key, 0) == pytest.approx(expected[key], rel=0.1, abs=small), key


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "mode", "mesh", "train"),
    [
        ("experts", "fsdp_tp", (2, 4), {}),
        ("gpt2", "cp", (1, 8), {"remat": "none"}),
        ("recipe", "fsdp", (8, 1), {}),
    ],
)
def test_the_compiled_step_sends_what_is_planned(
    architecture: str, mode: Mode, mesh: tuple[int, int], train: dict[str, Any]
) -> None:
    """Of one microbatch, where XLA's CPU compiler would move gathers out of the loop."""
    check_against_the_program(in_float16(run_of(architecture, mode, *mesh, **train)))


def test_on_accelerators_the_compiled_step_of_dp_sends_what_is_planned() -> None:
    run = run_of("gpt2", "dp", 8, 1)
    model = run.model.model_copy(update={"vocab_size": 128})  # a tile, so that no device pads it
    with trace_for(Target("gpu")):
        check_against_the_program(run._replace(model=model))
        kinds = {kind for kind, _ in by_kind(run)}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}


def test_data_parallel_sums_each_gradient_once_per_step() -> None:
    sent = by_kind(run_of("llama", "dp", 4096, 1, gradient_accumulation_steps=8))
    of_layer = 16 * 2 * (8 + 2) * 2 + 3 * 16 * 32 + 2 * 16  # q, k, v, o; ffn; norms
    weights = 61 * 16 + 3 * of_layer + 16
    assert sent == {("all-reduce", ("data",)): pytest.approx(2 * 4 * weights, rel=0.02)}


def test_fsdp_gathers_twice_and_reduce_scatters_once_per_microbatch() -> None:
    sent = by_kind(in_float16(run_of("llama", "fsdp", 16, 1, gradient_accumulation_steps=8)))
    matrices = 3 * (16 * 2 * (8 + 2) * 2 + 3 * 16 * 32)
    gathered = 2 * 2 * matrices + 4 * 3 * 2 * 16 + 2 * 61 * 16 + 4 * 16  # the head and a norm
    token_ids = 4 * 16 * 2 * LENGTH
    gradients = 4 * (matrices + 3 * 2 * 16 + 61 * 16 + 16)
    share = 15 / 16
    assert sent["all-gather", ("data",)] == pytest.approx(8 * share * (gathered + token_ids), 0.02)
    assert sent["reduce-scatter", ("data",)] == pytest.approx(8 * share * gradients, rel=0.02)
    embedded = 2 * 4 * 2 * LENGTH * 16
    assert sent["all-to-all", ("data",)] == pytest.approx(8 * share * embedded)


def test_cp_exchanges_queries_keys_values_and_results_of_every_layer() -> None:
    run = in_float16(run_of("llama", "cp", 2, 4))
    sent = [one for one in planned(run) if one.axes == ("context",) and one.kind == "all-to-all"]
    # 8 query heads, and 2 of keys and values, each for two devices; forward, again, backward
    elements = (8 + 4 + 4 + 8) * 2 * LENGTH // 4 * 2
    total = sum(one.array_bytes * one.runs_per_step for one in sent)
    assert total == 3 * 3 * 2 * elements
    kept = in_float16(run_of("llama", "cp", 2, 4, remat="none"))
    assert by_kind(kept)["all-to-all", ("context",)] == pytest.approx(total * 3 / 4 * 2 / 3)


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


def test_one_device_sends_nothing() -> None:
    assert planned(run_of("llama", "dp", 1, 1)) == []


def test_lora_sends_the_gradients_of_its_adapters() -> None:
    lora = {"rank": 2, "alpha": 2, "targets": ["query"]}
    sent = by_kind(run_of("llama", "dp", 2, 1, lora=lora, start_from="imported"))
    assert sent == {("all-reduce", ("data",)): pytest.approx(4 * 3 * 2 * (16 + 16), rel=0.1)}
