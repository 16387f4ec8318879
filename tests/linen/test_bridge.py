"""Modules of either kind inside the other, against the same mathematics without a bridge."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import Array

from rungs.linen.bridge import GPTAroundLinen, LinenGPT
from rungs.model.gpt import GPT
from tests.support.configs import model_config

CONFIG = model_config()
TOKENS_BS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 8)))
TARGETS_BS = jnp.roll(TOKENS_BS, -1, axis=1)


def loss_of(logits_BSV: Any) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, TARGETS_BS).mean()


def unbridged(variables: Any) -> GPT:
    """Our model with the parameters of a `LinenGPT`."""
    model = GPT(CONFIG, jax.random.key(5))
    nnx.update(model, variables["params"]["gpt"])
    return model


@pytest.fixture(scope="module")
def variables() -> Any:
    return LinenGPT(CONFIG).init(jax.random.key(0), TOKENS_BS)


class TestGPTInLinen:
    module = LinenGPT(CONFIG)

    def test_logits_and_gradients_are_those_of_the_model(self, variables: Any) -> None:
        model = unbridged(variables)
        np.testing.assert_array_equal(
            jax.jit(self.module.apply)(variables, TOKENS_BS), nnx.jit(lambda m: m(TOKENS_BS))(model)
        )
        ours = nnx.grad(lambda m: loss_of(m(TOKENS_BS)))(model)
        theirs = jax.grad(lambda v: loss_of(self.module.apply(v, TOKENS_BS)))(variables)
        found = jax.tree.leaves(theirs["params"]["gpt"])
        for ours_leaf, leaf in zip(jax.tree.leaves(ours), found, strict=True):
            np.testing.assert_allclose(ours_leaf, leaf, atol=1e-6)

    def test_params_are_plain_arrays_of_the_models_names(self, variables: Any) -> None:
        params = variables["params"]["gpt"]
        assert set(variables) == {"params"}
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
        names = {
            jax.tree_util.keystr(p, simple=True, separator=".")
            for p, _ in jax.tree_util.tree_leaves_with_path(params)
        }
        assert "blocks.attention.query.kernel" in names

    def test_it_is_part_of_another_module_and_is_trained(self) -> None:
        class Scaled(linen.Module):
            @linen.compact
            def __call__(self, tokens_BS: Array) -> Array:
                scale = self.param("scale", linen.initializers.ones, ())
                return scale * LinenGPT(CONFIG, name="model")(tokens_BS)

        module = Scaled()
        params = module.init(jax.random.key(0), TOKENS_BS)
        rule = optax.adam(0.01)
        state = rule.init(params)

        @jax.jit
        def step(params: Any, state: Any) -> tuple[Any, Any, Array]:
            loss, gradient = jax.value_and_grad(lambda p: loss_of(module.apply(p, TOKENS_BS)))(
                params
            )
            updates, state = rule.update(gradient, state)
            return optax.apply_updates(params, updates), state, loss

        losses = []
        for _ in range(8):
            params, state, loss = step(params, state)
            losses.append(float(loss))
        assert losses[-1] < losses[0] - 0.5

    def test_dropout_takes_its_own_stream(self, variables: Any) -> None:
        module = LinenGPT(CONFIG, drop_rate=0.5)

        def logits(seed: int, deterministic: bool = False) -> Array:
            rngs = {"dropout": jax.random.key(seed)}
            found: Any = module.apply(variables, TOKENS_BS, deterministic, rngs=rngs)
            return found

        np.testing.assert_array_equal(logits(1), logits(1))
        assert (logits(1) != logits(2)).any()
        np.testing.assert_array_equal(logits(1, True), self.module.apply(variables, TOKENS_BS))
        with pytest.raises(Exception, match="dropout"):
            module.apply(variables, TOKENS_BS, deterministic=False)


class LinenBlock(linen.Module):
    """A block with a second collection and a second stream of random keys."""

    drop_rate: float = 0.0

    @linen.compact
    def __call__(self, x_BSD: Array, train: bool = False) -> Array:
        y_BSD = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x_BSD)
        y_BSD = linen.Dense(x_BSD.shape[-1])(linen.gelu(y_BSD))
        return x_BSD + linen.Dropout(self.drop_rate, deterministic=not train)(y_BSD)


def linen_variables(block: Any) -> dict[str, Any]:
    """A block's arrays in Linen's collections."""
    norm, dense = block.BatchNorm_0, block.Dense_0
    return {
        "params": {
            "BatchNorm_0": {name: norm[name][...] for name in ("scale", "bias")},
            "Dense_0": {name: dense[name][...] for name in ("kernel", "bias")},
        },
        "batch_stats": {"BatchNorm_0": {name: norm[name][...] for name in ("mean", "var")}},
    }


class TestLinenInGPT:
    def model(self, **keys: Any) -> GPTAroundLinen:
        rngs = nnx.Rngs(params=0, dropout=1)
        return GPTAroundLinen(CONFIG, LinenBlock(**keys), rngs, mutable=("batch_stats",))

    def test_logits_and_statistics_are_those_of_linen(self) -> None:
        model = self.model()
        x_BSD = model.gpt.embed(TOKENS_BS, jnp.arange(8))
        statistics = []
        for block in model.blocks:
            x_BSD, updates = LinenBlock().apply(
                linen_variables(block), x_BSD, train=True, mutable=["batch_stats"]
            )
            statistics.append(updates["batch_stats"]["BatchNorm_0"]["mean"])
        logits_BSV = model(TOKENS_BS, train=True)
        np.testing.assert_allclose(logits_BSV, model.gpt.unembed(x_BSD), atol=1e-6)
        for block, mean in zip(model.blocks, statistics, strict=True):
            assert np.abs(mean).max() > 0
            np.testing.assert_allclose(block.BatchNorm_0["mean"][...], mean, atol=1e-7)

    def test_without_mutable_collections_nothing_changes(self) -> None:
        model = self.model()
        before = jax.tree.map(np.array, nnx.state(model, nnx.BatchStat))
        model(TOKENS_BS)
        after = nnx.state(model, nnx.BatchStat)
        jax.tree.map(np.testing.assert_array_equal, before, after)

    def test_blocks_have_weights_and_masks_of_their_own(self) -> None:
        model = self.model(drop_rate=0.5)
        first, second = (block.Dense_0["kernel"][...] for block in list(model.blocks)[:2])
        assert (first != second).all()
        assert (model(TOKENS_BS, train=True) != model(TOKENS_BS, train=True)).any()
        np.testing.assert_array_equal(model(TOKENS_BS), model(TOKENS_BS))

    def test_it_is_trained(self) -> None:
        model = self.model(drop_rate=0.1)
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

        @nnx.jit
        def step(model: GPTAroundLinen, optimizer: nnx.Optimizer) -> Array:
            def loss(model: GPTAroundLinen) -> Array:
                return loss_of(model(TOKENS_BS, train=True))

            value, gradient = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradient)
            return value

        losses = [float(step(model, optimizer)) for _ in range(10)]
        assert losses[-1] < losses[0] - 0.5
