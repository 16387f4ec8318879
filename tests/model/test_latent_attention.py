"""Multi-head latent attention: decoding in the absorbed form, its cache, and refused keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from rungs.config.run_config import conflicts
from rungs.model.attention import Cache
from rungs.model.generation import Generator
from tests.model.test_generation import ARCHITECTURES, varied_model
from tests.support.configs import model_config, train_config
from tests.support.tiny_model import bind_and_jit

TEXTS = [[5, 1, 30, 7, 2, 9, 9, 4, 11, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]]
DECODED = 6
LATENT = {"kv_rank": 6, "rope_dim": 4}
ROPE = {"positions": "rope", "latent_attention": LATENT}


def test_the_absorbed_form_gives_the_logits_of_the_plain_form() -> None:
    model = varied_model(**ARCHITECTURES["latent"])
    found = Generator(model).logits_after(TEXTS, DECODED)
    forward = bind_and_jit(lambda model, tokens_BS: model(tokens_BS), model)
    for row, text in zip(found, TEXTS, strict=True):
        expected = np.asarray(forward(jnp.asarray([text])))[0, -DECODED - 1 :]
        limit = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(row, expected, rtol=0, atol=limit)


def test_the_cache_is_at_most_a_quarter_of_that_of_grouped_queries() -> None:
    """Of DeepSeek-V2's heads; with eight query heads per key head, as in Llama 3 70B."""
    sizes = {"emb_dim": 5120, "n_heads": 128, "head_dim": 128, "positions": "rope"}
    latent = model_config(**sizes, latent_attention={"kv_rank": 512, "rope_dim": 64})
    grouped = model_config(**sizes, n_kv_heads=16)

    def elements(config: object) -> int:
        empty = jax.eval_shape(lambda: Cache.empty(config, 1, 1, jnp.dtype("float32")))  # type: ignore[arg-type]
        return sum(array.size for array in empty)

    assert elements(latent) == 512 + 64
    assert elements(latent) <= elements(grouped) / 4


def test_lora_is_for_the_output_only() -> None:
    lora = {"rank": 2, "alpha": 2, "targets": ["query", "output"]}
    lines = list(conflicts(model_config(**ROPE), train_config(lora=lora, start_from="imported")))
    assert lines == [
        "lora.targets: query: latent attention has no such projection; choose output",
    ]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"positions": "learned"}, 'latent_attention: needs positions "rope"'),
        ({"latent_attention": LATENT | {"rope_dim": 3}}, "latent_attention.rope_dim: 3 is odd"),
        ({"latent_attention": LATENT | {"value_dim": 13}}, "value_dim: 13 is above 12"),
        ({"n_kv_heads": 1}, "n_kv_heads: not supported with latent_attention"),
        ({"qkv_bias": True}, "qkv_bias: not supported with latent_attention"),
        ({"qk_norm": True}, "qk_norm: not supported with latent_attention"),
        ({"value_embedding_every": 2}, "value_embedding_every: not supported"),
        ({"mup": {"base_emb_dim": 8}}, "mup: not supported with latent_attention"),
    ],
)
def test_what_does_not_go_with_it_is_refused(keys: dict[str, object], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        model_config(**ROPE | keys)
