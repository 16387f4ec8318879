"""Plans of reinforcement learning against what sampling and updating really take."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import load_reinforcement_run
from rungs.config.sharding_config import ShardingConfig
from rungs.model.decoding import empty_caches
from rungs.model.gpt import GPT
from rungs.planning import hardware, policy_plan
from rungs.planning.policy_plan import PolicyPlan, plan, training_equivalent
from rungs.run.folder import RunFolder
from rungs.step.state import named_arrays
from tests.support.tiny_reinforcement import MODEL, make_reinforcement_run, write_start

pytestmark = pytest.mark.usefixtures("shared_traces")


def make_plan(folder: Path, device: str | None = None, **keys: object) -> PolicyPlan:
    run = make_reinforcement_run(folder, folder / "start", **keys)
    config = load_reinforcement_run(run.path)
    chosen = hardware.device_by_name(device) if device else hardware.cpu()
    sharding = ShardingConfig.of("dp", (1, 1))
    return plan(run, config, chosen, sharding, folder, 0.4, use_recorded=True)


def test_the_cache_and_the_sampler_are_what_they_take(tmp_path: Path) -> None:
    found = make_plan(tmp_path / "run", sampling_batch_size=6)
    model = GPT(found.config.model, jax.random.key(0))
    caches = empty_caches(found.config.model, 6, 16, jnp.dtype(jnp.float32))
    assert found.cache_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    weights = sum(array.nbytes for array in named_arrays(model).values())
    assert found.sampler_bytes == weights
    assert found.reference_bytes == 0
    assert found.updating_bytes == found.update.memory.total + weights
    stale = make_plan(tmp_path / "stale", sampling_batch_size=6, staleness=1)
    assert stale.updating_bytes == found.updating_bytes + found.cache_bytes


def test_the_update_is_planned_like_training_and_a_reference_is_another_copy(
    tmp_path: Path,
) -> None:
    found = make_plan(tmp_path / "run", updates_per_rollout=3, kl_coefficient=0.1)
    equivalent = training_equivalent(found.config)
    assert equivalent.train.gradient_accumulation_steps == 8
    assert equivalent.train.sequences_per_step == 16
    assert found.update.tokens.planned == 6 * 3 * 16 * 16
    assert found.reference_bytes == found.update.memory.weights


def test_a_teacher_takes_the_memory_of_its_own_weights(tmp_path: Path) -> None:
    teacher = write_start(tmp_path / "teacher", n_layers=3)
    alone = make_plan(tmp_path / "alone")
    found = make_plan(tmp_path / "run", teacher=str(teacher), advantage="none")
    model = GPT(ModelConfig.model_validate(MODEL | {"n_layers": 3}), jax.random.key(0))
    weights = sum(array.nbytes for array in named_arrays(model).values())
    assert found.teacher_bytes == weights
    assert found.updating_bytes == alone.updating_bytes + weights
    assert found.sampling_bytes == alone.sampling_bytes + weights
    assert "pays each token" in policy_plan.as_text(RunFolder(tmp_path / "run"), found)


def test_times_are_computed_for_a_device_and_taken_from_metrics(tmp_path: Path) -> None:
    found = make_plan(tmp_path / "run", device="h100")
    assert found.phases is not None
    assert found.phases.verifying is None
    assert found.phases.sampling > 0
    run = RunFolder(tmp_path / "run")
    text = policy_plan.as_text(run, found)
    assert "depends on the verifier" in text
    assert text.endswith("It fits.")
    content = json.loads(policy_plan.as_json(found))
    assert content["seconds"]["updating"] == found.phases.updating
    assert content["seconds_left"] == 6 * found.phases.total
    assert content["cost_left"] is None
    priced = found._replace(update=found.update._replace(price_per_device_hour=1e9))
    cost = 1e9 * 6 * found.phases.total / 3600
    assert json.loads(policy_plan.as_json(priced))["cost_left"] == pytest.approx(cost)
    shown = policy_plan.as_text(run, priced)
    assert f"\ncost      {cost:,.2f} without validations; an hour costs 1,000,000,000" in shown
    assert f"by its FLOPs a step takes {1e3 * found.phases.total:.2g} ms;" in text
    assert content["fits"] is True
