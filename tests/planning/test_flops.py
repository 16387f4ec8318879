"""Planned parameters, FLOPs and checkpoint sizes, against numbers by hand and XLA's counts."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array

from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model import blocks, gpt
from rungs.model.kernels import cross_entropy
from rungs.parallel.target_device import Target, trace_for
from rungs.planning import flops
from rungs.planning.forecast import forecast, state_bytes
from rungs.planning.hardware import device_by_name
from rungs.planning.report import as_text
from rungs.run.folder import StartOptions
from rungs.step import state
from rungs.step.state import AbstractState, shapes_of
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.configs import model_config, train_config
from tests.support.long import long_except
from tests.support.plan_cases import FAMILIES, PlanCase, lowered
from tests.support.tiny_run import last_checkpoint, make_dataset, make_run

QUICK = [
    PlanCase("gpt2", "full", "dp", 1, "bfloat16"),
    PlanCase("mixtral", "full", "fsdp", 4, "bfloat16"),
]
CASES = [
    *QUICK,
    PlanCase("llama", "dots", "dp", 4, "bfloat16"),
    PlanCase("mistral", "activations", "fsdp", 4, "float32"),
    PlanCase("gemma", "none", "fsdp", 4, "float32"),
    PlanCase("olmo", "activations", "dp", 1, "float32"),
    PlanCase("deepseek", "full", "dp", 1, "float32"),
    PlanCase("recipe", "activations", "dp", 4, "bfloat16"),
    PlanCase("a-to-a", "dots", "fsdp", 1, "float32"),
    PlanCase("multi-token", "dots", "fsdp", 1, "float32"),
    PlanCase("masked", "none", "dp", 1, "bfloat16"),
]
"""Each family, and each remat policy."""
WIDE = {"emb_dim": 768, "n_heads": 12, "n_layers": 2}
"""The width of GPT-2 small, so that elementwise operations are small beside matmuls."""


def counted_flops(run: RunConfig) -> float:
    """Return XLA's FLOPs per token of a step whose loop over layers is unrolled. XLA counts the
    body of the loop over microbatches once, and one device's share."""
    model, train = run
    periods = max(model.n_layers // len(model.repeated_kinds), 1)
    unrolled = train.model_copy(update={"scan_unroll": periods})
    analysis = lowered(RunConfig(model, unrolled)).cost_analysis()
    assert analysis is not None
    assert train.sharding is not None
    sequences = train.microbatch_size // train.sharding.sizes[0]
    return float(analysis["flops"]) / (sequences * model.context_length)


@pytest.fixture
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute head and loss in one chunk, without a loop."""
    monkeypatch.setitem(cross_entropy.LOGITS_BYTES, "cpu", 1 << 50)


def wide(run: RunConfig) -> RunConfig:
    layered = WIDE if run.model.n_layers else {"emb_dim": WIDE["emb_dim"]}
    return RunConfig(run.model.model_copy(update=layered), run.train)


@pytest.mark.usefixtures("one_chunk")
@pytest.mark.parametrize("case", long_except(QUICK, CASES), ids=str)
def test_flops_match_xla(case: PlanCase) -> None:
    run = wide(case.run())
    assert flops.hardware_flops_per_token(run).total == pytest.approx(counted_flops(run), rel=0.02)


@pytest.mark.usefixtures("one_chunk")
@pytest.mark.long
def test_with_dropout_attention_is_not_blockwise() -> None:
    run = wide(PlanCase("gpt2", "full", "dp", 1, "float32").run(drop_rate=0.1))
    assert flops.hardware_flops_per_token(run).total == pytest.approx(counted_flops(run), rel=0.02)
    square = 4 * 256 * 768 * 2
    assert flops.hardware_flops_per_token(run).attention.forward == square


def test_flops_by_hand() -> None:
    model = model_config(
        vocab_size=100, context_length=16, emb_dim=8, n_layers=3, n_heads=2, feed_forward="swiglu"
    )
    plain = RunConfig(model, train_config(remat="none", drop_rate=0.1))
    full = RunConfig(model, train_config(remat="full", drop_rate=0.1))
    weights, last = 3 * (4 * 64 + 3 * 8 * 32), 3 * 8 * 32
    found = flops.hardware_flops_per_token(plain)
    assert found.layers == (2 * weights, 0, 4 * weights)
    assert found.attention == (3 * 4 * 16 * 8, 0, 3 * 8 * 16 * 8)
    assert found.head == (2 * 800, 0, 4 * 800)
    # the result of a layer's last matmul is only added, so it is not recomputed
    assert flops.hardware_flops_per_token(full).layers.recompute == 2 * (weights - last)
    assert flops.hardware_flops_per_token(full).attention.recompute == 3 * 4 * 16 * 8
    conventional = flops.model_flops_per_token(shapes_of(model), model, 16)
    others = 3 * (3 * 8 + 8 + 2 * 32 + 8 + 4 * 8) + 2 * 8 - 3 * 3 * 8  # biases of it; norms
    assert conventional == 6 * (weights + 800 + others) + 12 * 3 * 8 * 16


def test_a_prediction_module_counts_as_a_layer_that_uses_the_head_again() -> None:
    sizes = {"vocab_size": 100, "emb_dim": 8, "n_heads": 2, "norm": "none", "positions": "none"}
    plain, more = (model_config(**sizes, prediction_module=on) for on in (False, True))
    one, other = (flops.model_flops_per_token(shapes_of(it), it, 16) for it in (plain, more))
    layer = 12 * 64 + 8 + 32 + 8  # with biases of attention's output and the feed-forward layer
    assert other - one == 6 * (2 * 64 + layer + 800) + 12 * 8 * 16


@pytest.mark.parametrize(("target", "share"), [(Target("cpu"), 2), (Target("gpu", "8.0"), 1)])
def test_without_a_grouped_matmul_each_token_has_every_expert(target: Target, share: int) -> None:
    dense, mixed = (
        PlanCase(name, "none", "dp", 1, "bfloat16").run() for name in ("llama", "mixtral")
    )
    with trace_for(target):
        one, other = (
            flops.hardware_flops_per_token(dense).layers.forward,
            flops.hardware_flops_per_token(mixed).layers.forward,
        )
    router, experts = 2 * 4 * 512 * 4, 2 * 4 * 3 * 512 * 704 * 2
    of_dense = 2 * 4 * 3 * 512 * 1408
    # the weighted sum of experts is a small matmul, too
    assert other == pytest.approx(one - of_dense + router + share * experts, rel=1e-4)


def test_parameters_by_group() -> None:
    model = model_config(vocab_size=100, context_length=16, emb_dim=8, qk_norm=True)
    found = flops.count_parameters(shapes_of(model))
    assert found.embedding == 100 * 8 + 16 * 8
    assert found.head == 100 * 8
    assert found.attention == 2 * (4 * 64 + 8)
    assert found.feed_forward == 2 * (2 * 8 * 32 + 32 + 8)
    assert found.norms == 2 * (2 * 2 * 8 + 2 * 2 * 4) + 2 * 8
    assert found.low_rank == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_add_up_to_the_model(family: str) -> None:
    run = PlanCase(family, "none", "dp", 1, "float32").run()
    sizes = [math.prod(shape) for shape in shapes_of(run.model).values()]
    assert flops.count_parameters(shapes_of(run.model)).total == sum(sizes)
    active = flops.count_active_parameters(shapes_of(run.model), run.model)
    whole = flops.count_parameters(shapes_of(run.model))
    assert active._replace(feed_forward=0) == whole._replace(feed_forward=0)
    idle = {
        "mixtral": 4 * 2 * 3 * 512 * 704,
        "deepseek": 3 * 6 * 3 * 512 * 352,
        "gpt-oss": 4 * 2 * (3 * 512 * 352 + 2 * 352 + 512),
    }
    assert active.total == whole.total - idle.get(family, 0)


def test_lora_is_counted_and_its_base_has_no_gradient() -> None:
    lora = {"rank": 4, "alpha": 4, "targets": ["query", "output", "down"]}
    run = wide(PlanCase("llama", "none", "dp", 1, "float32").run())
    train = train_config(**run.train.as_json() | {"lora": lora, "start_from": "imported"})
    adapted = RunConfig(run.model, train)
    added = 2 * 4 * (2 * (768 + 768) + 1408 + 768)
    shapes = AbstractState(adapted, 1).shapes
    assert flops.count_parameters(shapes).low_rank == added
    assert shapes_of(adapted.model, adapted.train.lora) == shapes
    one, other = (flops.hardware_flops_per_token(each).layers for each in (run, adapted))
    assert other.forward == one.forward + 2 * added
    assert other.backward == one.forward + 4 * added


class GatedBlock(blocks.Block):
    """A block with a parameter that no estimate knows."""

    def __init__(self, config: ModelConfig, key: Array, **how: Any) -> None:
        super().__init__(config, key, **how)
        self.gate = nnx.Param(jnp.zeros(config.emb_dim), axes=("emb",), inputs=0)


class GPTWithMemory(gpt.GPT):
    """A model with a matrix that no estimate knows."""

    def __init__(self, config: ModelConfig, key: Array) -> None:
        super().__init__(config, key)
        self.memory = nnx.Param(jnp.zeros((4, config.emb_dim)), axes=("slot", "emb"), inputs=1)


@pytest.fixture
def new_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build models with parameters that no estimate knows."""
    monkeypatch.setattr(blocks, "Block", GatedBlock)
    monkeypatch.setattr(state, "GPT", GPTWithMemory)


@pytest.mark.usefixtures("new_parameters")
def test_new_parameters_are_planned_in_a_group_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    config = run_config.load_run(run.path)
    sharding = ShardingConfig(mode="dp", data=1, tensor=1)
    found = forecast(run, config, device_by_name("h100"), sharding, tmp_path, 0.4)
    assert found.parameters.other == found.active.other == 4 * 32 + 2 * 32
    assert f"  other       {4 * 32 + 2 * 32:18,}" in as_text(run, found)


@pytest.mark.long
@pytest.mark.usefixtures("new_parameters")
def test_checkpoint_bytes_match_a_checkpoint_on_disk(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", min_train_tokens=128)
    settings = run_config.load_run(run.path)
    assert launch(run, settings, StartOptions(), on_datasets(tmp_path / "datasets")) == 0
    arrays = [
        file
        for file in last_checkpoint(run).folder.rglob("*")
        if file.name == "model.safetensors" or "optimizer" in file.parts
    ]
    on_disk = sum(file.stat().st_size for file in arrays if file.is_file())
    # files also have headers
    assert state_bytes(settings, None) == pytest.approx(on_disk, rel=0.1)
