"""`rungs.patch`: activations change where they should, and nowhere else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rungs
from tests.model.test_gpt import VARIANTS
from tests.support.tiny_model import random_model, random_tokens

LAYERS = 3
NAMES = ("gpt2", "gemma-2", "mixtral")
PLACES = ("residual", "attention", "head 1", "feed-forward")


@functools.cache
def model_of(name: str) -> rungs.GPT:
    return random_model(**VARIANTS[name] | {"n_layers": LAYERS})


@nnx.jit
def logits(model: rungs.GPT, tokens_BS: Any) -> Any:
    return model(tokens_BS)


@pytest.mark.parametrize("name", NAMES)
def test_functions_that_change_nothing_change_no_bit(name: str) -> None:
    model, tokens_BS = model_of(name), jnp.asarray(random_tokens(2, 7))
    places = {f"layer {n} {place}": lambda x: x for n in range(LAYERS) for place in PLACES}
    expected, found = (logits(one, tokens_BS) for one in (model, rungs.patch(model, places)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("gpt2", place) for place in PLACES),
        *(("gemma-2", place) for place in ("residual", "attention")),
        *(("mixtral", place) for place in ("head 1", "feed-forward")),
    ],
)
def test_a_function_gets_and_replaces_its_activation(name: str, place: str) -> None:
    """The second layer's is replaced by that of another text; layers before it are as they were."""
    model, where = model_of(name), f"layer 1 {place}"
    tokens_BS, others_BS = random_tokens(2, 2, 7)
    before, new = rungs.look(model, tokens_BS), rungs.look(model, others_BS).at(where)
    patched = rungs.patch(model, {where: lambda _: new})
    found = rungs.look(patched, tokens_BS)
    np.testing.assert_array_equal(found.at(where), new)
    first = "layer 0 residual"
    np.testing.assert_allclose(found.at(first), before.at(first), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found.at("layer 2 residual"), before.at("layer 2 residual"))
    if place == "residual":
        found_BSV = logits(patched, jnp.asarray(tokens_BS))
        np.testing.assert_allclose(found_BSV, logits(model, jnp.asarray(others_BS)), atol=1e-4)


def test_an_ablated_head_is_one_without_its_output_projection() -> None:
    model, tokens_BS = model_of("gpt2"), jnp.asarray(random_tokens(2, 7))
    ablated = rungs.patch(model, {"layer 1 head 1": jnp.zeros_like})
    graph, state = nnx.split(model)
    without = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    assert without.blocks is not None
    assert without.blocks.attention is not None
    kernel = without.blocks.attention.output.kernel
    kernel.set_value(kernel.get_value().at[1, 1].set(0))
    np.testing.assert_allclose(
        logits(ablated, tokens_BS), logits(without, tokens_BS), rtol=1e-5, atol=1e-6
    )
    assert not np.allclose(logits(ablated, tokens_BS), logits(model, tokens_BS))


def test_an_output_is_that_of_its_own_norm() -> None:
    """Its norm would undo a factor before it. The scale of Gemma's is 1 + what is stored."""
    model, tokens_BS = model_of("gemma-2"), jnp.asarray(random_tokens(2, 7))
    doubled = rungs.patch(model, {"layer 1 attention": lambda x: 2 * x})
    graph, state = nnx.split(model)
    larger = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    assert larger.blocks is not None
    assert larger.blocks.attention_output_norm is not None
    scale: Any = larger.blocks.attention_output_norm.scale
    scale.set_value(scale.get_value().at[1].set(1 + 2 * scale.get_value()[1]))
    np.testing.assert_allclose(
        logits(doubled, tokens_BS), logits(larger, tokens_BS), rtol=1e-4, atol=1e-5
    )
    assert not np.allclose(logits(doubled, tokens_BS), logits(model, tokens_BS))


def test_the_model_itself_is_unchanged() -> None:
    model, tokens_BS = model_of("gpt2"), jnp.asarray(random_tokens(2, 7))
    graph, before = nnx.graphdef(model), logits(model, tokens_BS)
    rungs.look(rungs.patch(model, {"layer 0 residual": jnp.zeros_like}), tokens_BS)
    rungs.look(model, tokens_BS)
    assert nnx.graphdef(model) == graph
    np.testing.assert_array_equal(logits(model, tokens_BS), before)


@pytest.mark.parametrize("place", ["residual", "head 1"])
def test_patches_add_up_in_their_order(place: str) -> None:
    model, tokens_BS, where = model_of("gpt2"), random_tokens(1, 7), f"layer 1 {place}"
    once = rungs.patch(model, {where: lambda x: x + 1})
    twice = rungs.patch(once, {where: lambda x: 3 * x})
    expected = 3 * (rungs.look(model, tokens_BS).at(where) + 1)
    found = rungs.look(twice, tokens_BS).at(where)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_losses_gradients_and_generation_follow() -> None:
    model, tokens_BS = model_of("gpt2"), jnp.asarray(random_tokens(2, 7))
    zeros = {f"layer {n} residual": jnp.zeros_like for n in range(LAYERS)}
    patched = rungs.patch(model, zeros)
    uniform = logits(patched, tokens_BS)[0, 0]
    expected = -jax.nn.log_softmax(uniform)[tokens_BS]
    losses_BS = nnx.jit(lambda model: model.losses(tokens_BS, tokens_BS))(patched)
    np.testing.assert_allclose(losses_BS, expected, rtol=1e-5)
    gradient = nnx.jit(nnx.grad(lambda model: model(tokens_BS)[..., 0].sum()))(patched)
    assert not gradient["token_embedding"]["embedding"][...].any()
    assert gradient["head"]["kernel"][...].any() or gradient["final_norm"]["bias"][...].any()
    [text] = rungs.Generator(patched).generate([[1, 2, 3]], rungs.Request(4))
    assert text == [int(uniform.argmax())] * 4


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("layer 3 head 0", jnp.zeros_like, '"layer N head M", for N from 0 to 1 and M from 0 to 1'),
        ("layer 0 head 2", jnp.zeros_like, "no such place"),
        ("layer 0 mlp", jnp.zeros_like, 'the model has "layer N residual", "layer N attention"'),
        ("layer 0 residual", lambda x: x[0], r"returns shape \(7, 16\)"),
    ],
)
def test_wrong_places_and_shapes_are_refused(name: str, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rungs.patch(random_model(), {name: function})(jnp.asarray(random_tokens(1, 7)))


def test_a_model_without_the_layer_has_no_such_place() -> None:
    with pytest.raises(ValueError, match="the model has no layers"):
        rungs.patch(random_model(n_layers=0), {"layer 0 residual": jnp.zeros_like})
    with pytest.raises(ValueError, match='attention" and "layer N head M"'):
        rungs.patch(random_model(feed_forward="none"), {"layer 0 feed-forward": jnp.zeros_like})
