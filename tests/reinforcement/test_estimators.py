"""GSPO and its gradient: the objective of the paper in float64, differentiated numerically for
logits, and by JAX through a model. What a teacher pays. Axes as in `rungs/objectives/policy.py`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import load_reinforcement_run
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.objectives.policy import PolicyObjective, PolicyTokens, shares
from rungs.reinforcement.policy_update import PolicyUpdater, policy_fields
from rungs.reinforcement.rollout_files import Completion
from rungs.step.objective import Microbatch
from rungs.step.state import create_model_and_optimizer
from tests.support.configs import mesh_of
from tests.support.tiny_model import quick_jit, random_model
from tests.support.tiny_reinforcement import MODEL, make_reinforcement_run

LOW, HIGH, TEMPERATURE = 0.03, 0.05, 0.8
TRAIN = ReinforceConfig.model_construct(
    loss="gspo", clip_low=LOW, clip_high=HIGH, temperature=TEMPERATURE
)
ADVANTAGES_B = np.array([1.5, -0.7, 0.4, -1.1])
TARGETS_BS = np.array(
    [[-1, 3, 1, 4, 2, 0], [-1, -1, 5, 3, 0, -1], [2, 2, -1, -1, 6, -1], [-1, 4, 0, -1, -1, -1]]
)
IS_SAMPLED_BS = TARGETS_BS >= 0


def extras(old_BS: np.ndarray) -> PolicyTokens:
    """Return what the weights need, with GSPO's mean over completions and over their tokens."""
    lengths_B, counts_B = IS_SAMPLED_BS.sum(-1), np.ones(4, bool)
    shares_B = shares("sequences", lengths_B, counts_B, 99)
    per_token = [np.where(IS_SAMPLED_BS, a[:, None], 0) for a in (shares_B, ADVANTAGES_B)]
    arrays = *per_token, old_BS, 0 * old_BS, 0 * old_BS
    return PolicyTokens(*(array.astype(np.float32) for array in arrays))


def objective_of(log_probs_BS: Any, old_BS: Any, np: Any = np) -> Any:
    """Return J of equations 5 and 7 of Zheng et al. 2025: the mean over completions of
    min(s A, clip(s) A), with s = (π(y) ÷ π_old(y)) ^ (1 ÷ tokens)."""
    total_B = np.where(IS_SAMPLED_BS, log_probs_BS - old_BS, 0).sum(-1)
    ratios_B = np.exp(total_B / IS_SAMPLED_BS.sum(-1))
    clipped_B = np.clip(ratios_B, 1 - LOW, 1 + HIGH)
    return np.minimum(ratios_B * ADVANTAGES_B, clipped_B * ADVANTAGES_B).mean()


def own_log_probs(logits_BSV: np.ndarray) -> np.ndarray:
    scaled_BSV = logits_BSV / TEMPERATURE
    log_p_BSV = scaled_BSV - np.log(np.exp(scaled_BSV).sum(-1, keepdims=True))
    return np.take_along_axis(log_p_BSV, np.maximum(TARGETS_BS, 0)[..., None], -1)[..., 0]


def old_of(log_probs_BS: np.ndarray) -> np.ndarray:
    """Return older log-probabilities by which two completions' ratios are clipped: the first too
    high, the second too low; tokens alone are out of the range in the others, too."""
    means_B = np.array([0.2, -0.2, 0.01, 0.04])
    noise_BS = np.random.default_rng(2).normal(size=TARGETS_BS.shape)
    noise_BS -= (noise_BS * IS_SAMPLED_BS).sum(-1, keepdims=True) / IS_SAMPLED_BS.sum(
        -1, keepdims=True
    )
    return np.where(IS_SAMPLED_BS, log_probs_BS - means_B[:, None] - 0.3 * noise_BS, 0)


def test_gspo_has_the_gradient_of_the_papers_objective() -> None:
    logits = np.random.default_rng(0).normal(size=(*TARGETS_BS.shape, 7))
    old_BS, step = old_of(own_log_probs(logits)), 1e-5
    expected = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        change = np.zeros_like(logits)
        change[place] = step
        ends = (objective_of(own_log_probs(logits + c), old_BS) for c in (change, -change))
        expected[place] = np.subtract(*ends) / (2 * step)
    is_zero_B = np.abs(expected).max(axis=(1, 2)) == 0
    assert is_zero_B.tolist() == [True, True, False, False]

    objective = PolicyObjective(TRAIN, False, TARGETS_BS.shape[1])
    arrays = TARGETS_BS, *extras(old_BS)
    found = jax.grad(objective.of_logits)(jnp.asarray(logits, jnp.float32), *arrays)
    np.testing.assert_allclose(-found, expected, atol=1e-5 * np.abs(expected).max())


def test_through_a_model_the_head_is_applied_a_chunk_at_a_time() -> None:
    model = random_model()
    inputs_BS = np.random.default_rng(1).integers(7, size=TARGETS_BS.shape)
    logits_BSV = np.asarray(model(jnp.asarray(inputs_BS)), np.float64)
    old_BS = old_of(own_log_probs(logits_BSV))

    @quick_jit
    @nnx.grad
    def expected(model: GPT) -> Array:
        log_p_BSV = jax.nn.log_softmax(model(jnp.asarray(inputs_BS)) / TEMPERATURE)
        targets_BS1 = jnp.maximum(TARGETS_BS, 0)[..., None]
        own_BS = jnp.take_along_axis(log_p_BSV, targets_BS1, -1)[..., 0]
        return -objective_of(own_BS, old_BS, jnp)

    @quick_jit
    @nnx.grad
    def found(model: GPT) -> Array:
        arrays = map(jnp.asarray, (inputs_BS, TARGETS_BS, *extras(old_BS)))
        microbatch: Any = Microbatch(tuple(arrays), None, None)  # type: ignore[arg-type]
        return PolicyObjective(TRAIN, False, TARGETS_BS.shape[1]).loss(
            model, Compute(), microbatch
        )[0]

    one, other = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient(model))])
        for gradient in (found, expected)
    )
    assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


def completion(tokens: list[int], log_probs: list[float], reward: float) -> Completion:
    keys: dict[str, Any] = dict.fromkeys(("prompt", "text", "answer", "message"), "")
    keys |= dict.fromkeys(("task", "place", "sample"), 0)
    rewards = {"": reward}
    found: dict[str, Any] = {"tokens": tokens, "log_probs": log_probs, "rewards": rewards}
    return Completion(**keys, **found, finished=True, correct=False, status="ok")


def test_a_teacher_pays_every_token_besides_the_advantage(tmp_path: Path) -> None:
    keys = {"teacher": "runs/none", "teacher_coefficient": 0.3, "temperature": TEMPERATURE}
    run = make_reinforcement_run(tmp_path / "run", tmp_path, **keys)
    config, mesh, random = load_reinforcement_run(run.path), mesh_of(1), np.random.default_rng(5)
    teacher = random_model(**MODEL | {"n_layers": 2})
    model, optimizer = create_model_and_optimizer(config, 10, mesh, {})
    vocab = config.model.vocab_size
    prompts = [random.integers(vocab, size=3).tolist() for _ in range(16)]
    rewards = random.normal(size=16)
    completions = []
    for number in range(16):
        tokens = random.integers(vocab, size=1 + number % 6)
        log_probs = random.normal(-2, 0.3, len(tokens)).astype(np.float32)
        completions.append(completion(tokens.tolist(), log_probs.tolist(), rewards[number]))
    updater = PolicyUpdater(config, mesh, None, teacher, 3)
    updated = updater.update(model, optimizer, prompts, completions)
    forward = quick_jit(teacher)
    for number, one in enumerate(completions):
        texts = np.zeros((1, 16), np.int32)
        texts[0, : 3 + len(one.tokens)] = prompts[number] + one.tokens
        logits = np.asarray(forward(jnp.asarray(texts)), np.float64)[0] / TEMPERATURE
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        own = [log_p[2 + place, token] for place, token in enumerate(one.tokens)]
        group = rewards[number // 4 * 4 : number // 4 * 4 + 4]
        paid = rewards[number] - group.mean() + 0.3 * np.subtract(own, one.log_probs)
        found = updated.advantages_NS[number]
        np.testing.assert_allclose(found[2 : 2 + len(own)], paid, rtol=1e-5, atol=1e-5)
        assert np.count_nonzero(found) == len(own)
    assert updated.first.step.gradient_norm > 0
    fields = policy_fields(updated, config.train)
    assert fields["teacher_kl"] > 0
    assert fields["kl"] is None
