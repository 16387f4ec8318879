"""What "auto" means for `remat` and `scan_unroll`."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig, load_run
from rungs.config.train_config import TrainConfig
from rungs.model import remat
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.layers import Dropout
from rungs.model.remat import LayerLoop
from rungs.parallel.target_device import Target, trace_for
from rungs.run.folder import RunFolder, StartOptions
from rungs.training import start as start_module
from rungs.training.dataset_learner import on_datasets
from tests.support.configs import model_config, train_config
from tests.support.tiny_run import change, last_checkpoint, make_dataset, make_run

IN_A_LOOP = LayerLoop("dots", 1)


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def go(run: RunFolder, datasets: Path, **start: Any) -> int:
    return start_module.launch(
        run, load_run(run.path), StartOptions(**start), on_datasets(datasets)
    )


def loop_of(n_layers: int = 4, target: str = "cpu", **train: Any) -> LayerLoop:
    model = model_config(n_layers=n_layers)
    with trace_for(Target(target)):
        return remat.layer_loop(train_config(**train), model)


@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [
        ("cpu", {}, LayerLoop("none", 4)),
        ("cpu", {"remat": "none"}, LayerLoop("none", 4)),
        ("cpu", {"remat": "dots"}, LayerLoop("dots", 1)),  # an unrolled one would be undone
        ("cpu", {"remat": "full"}, LayerLoop("full", 1)),
        ("cpu", {"scan_unroll": 1}, IN_A_LOOP),
        ("cpu", {"scan_unroll": 4}, LayerLoop("none", 4)),
        ("cpu", {"scan_unroll": 2}, LayerLoop("dots", 2)),
        ("cpu", {"remat": "none", "scan_unroll": 1}, LayerLoop("none", 1)),
        ("cpu", {"sharding": {"mode": "dp", "data": 2}}, LayerLoop("none", 4)),
        ("cpu", {"sharding": {"mode": "tp", "tensor": 2}}, LayerLoop("none", 4)),
        ("cpu", {"sharding": {"mode": "fsdp", "data": 2}}, IN_A_LOOP),
        ("cpu", {"sharding": {"mode": "cp", "context": 2}}, IN_A_LOOP),
        ("gpu", {}, LayerLoop("dots", 4)),
        ("gpu", {"remat": "full"}, LayerLoop("full", 1)),
        ("gpu", {"remat": "none"}, LayerLoop("none", 4)),
        ("gpu", {"scan_unroll": 1}, IN_A_LOOP),
        ("gpu", {"sharding": {"mode": "dp", "data": 2}}, LayerLoop("dots", 4)),
        ("gpu", {"sharding": {"mode": "fsdp", "data": 2}}, IN_A_LOOP),
        ("tpu", {}, IN_A_LOOP),
    ],
)
def test_layers_that_are_not_gathered_are_unrolled_unless_told_otherwise(
    target: str, given: dict[str, Any], expected: LayerLoop
) -> None:
    assert loop_of(target=target, **given) == expected


def test_a_pattern_is_unrolled_by_its_periods_up_to_a_number_of_layers() -> None:
    assert loop_of(12).unroll == 12
    assert loop_of(13) == IN_A_LOOP
    pattern = {"layer_pattern": ["sliding", "global"], "sliding_window": 8}
    assert loop_of(24, "gpu").unroll == 24
    assert loop_of(25, "gpu") == IN_A_LOOP
    for n_layers, expected in ((12, LayerLoop("none", 6)), (14, IN_A_LOOP)):
        model = model_config(n_layers=n_layers, **pattern)
        assert remat.layer_loop(train_config(), model) == expected


@pytest.mark.parametrize(
    ("target", "train", "expected"),
    [
        ("cpu", {}, LayerLoop("dots", 1)),
        ("cpu", {"remat": "dots"}, LayerLoop("dots", 1)),
        ("cpu", {"remat": "none"}, LayerLoop("none", 4)),
        ("cpu", {"scan_unroll": 4}, LayerLoop("none", 4)),
        ("gpu", {}, LayerLoop("dots", 4)),
    ],
)
def test_only_a_cpu_keeps_the_recorded_loop_if_the_settings_allow(
    target: str, train: dict[str, Any], expected: LayerLoop
) -> None:
    with trace_for(Target(target)):
        found = remat.layer_loop(train_config(**train), model_config(n_layers=4), IN_A_LOOP)
    assert found == expected


@pytest.mark.parametrize(
    ("target", "expected"), [("gpu", LayerLoop("dots", 4)), ("tpu", IN_A_LOOP)]
)
def test_accelerators_ignore_the_loop_of_a_cpu(target: str, expected: LayerLoop) -> None:
    with trace_for(Target(target)):
        of_cpu = LayerLoop("none", 4)
        assert remat.layer_loop(train_config(), model_config(n_layers=4), of_cpu) == expected


def test_layers_stay_in_a_loop_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in ((math.inf, "none"), (1e9, "none"), (1e4, "dots")):
        monkeypatch.setattr(remat, "memory_bytes", lambda size=size: size)
        assert loop_of().remat == expected


@pytest.mark.long
def test_a_run_records_its_loop_and_keeps_it_on_a_machine_with_less_memory(
    tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=6 * 128)
    assert go(run, datasets) == 0
    unrolled = remat.layer_loop(train_config(), load_run(run.path).model)
    recorded = last_checkpoint(run).meta.train
    assert unrolled.as_keys().items() <= recorded.items()
    monkeypatch.setattr(remat, "memory_bytes", lambda: 1e4)
    change(run, min_train_tokens=8 * 128)
    assert go(run, datasets, extend=True) == 0
    assert unrolled.as_keys().items() <= last_checkpoint(run).meta.train.items()
    change(run, scan_unroll=1, min_train_tokens=10 * 128)
    assert go(run, datasets, extend=True) == 0
    assert IN_A_LOOP.as_keys().items() <= last_checkpoint(run).meta.train.items()


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "drop_rate"),
    [
        ({"feed_forward": "swiglu", "n_experts": 4, "experts_per_token": 2}, 0),
        ({"context_length": 512}, 0.1),
    ],
)
def test_layers_keep_no_more_than_is_assumed(changes: dict[str, Any], drop_rate: float) -> None:
    """JAX's own account of what the derivative keeps, without what XLA would make of it."""
    model = model_config(n_layers=2, emb_dim=32, n_heads=4, **{"context_length": 64, **changes})
    train: TrainConfig = train_config(microbatch_size=4, drop_rate=drop_rate)
    run = RunConfig(model, train)
    gpt, compute = GPT(model, jax.random.key(0)), Compute(remat="none", unroll=2)
    tokens = jnp.zeros((4, run.sequence_length), jnp.int32)

    def dropout_of(rows: int) -> Dropout:
        return Dropout.of(drop_rate, jax.random.key(1), jnp.arange(rows))

    def residual_bytes(rows: int) -> int:
        graph, state = nnx.split(gpt)

        def loss(state: nnx.State) -> jax.Array:
            return nnx.merge(graph, state).summed_loss(
                tokens[:rows], tokens[:rows], dropout_of(rows), compute
            )[0]

        _, pull = jax.vjp(loss, state)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))

    grown = residual_bytes(4) - residual_bytes(2)  # without the weights
    kept = remat._kept_bytes(train, model)
    assert kept / 3 < 2 * grown < kept
