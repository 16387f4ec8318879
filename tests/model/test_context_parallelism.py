"""The tokens of sequences split over devices: heads exchanged for tokens, dropout, positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from rungs.model.attention import from_heads_to_tokens, from_tokens_to_heads
from rungs.model.layers import Dropout
from rungs.model.positions import own_positions
from tests.support.configs import mesh_of

TOKENS = P("data", "context")


def on_mesh(function: Callable[..., Array], *arrays: Array, result: P = TOKENS) -> np.ndarray:
    """Return the joined results of two rows of four devices, each with its part of the tokens."""
    mapped = jax.shard_map(
        function, mesh=mesh_of(2, 4, "cp"), in_specs=(TOKENS,) * len(arrays), out_specs=result
    )
    return np.asarray(jax.jit(mapped)(*arrays))


def numbered(heads: int) -> Array:
    """An array (2, 8, heads, 3) of distinct numbers."""
    return jnp.arange(2 * 8 * heads * 3.0).reshape(2, 8, heads, 3)


@pytest.mark.parametrize(
    ("heads", "of_devices"),
    [(8, [0, 1, 2, 3, 4, 5, 6, 7]), (4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])],
)
def test_a_device_gets_its_heads_of_all_tokens(heads: int, of_devices: list[int]) -> None:
    """In the order in which groups of query heads share a key head."""
    x_BSNH = numbered(heads)
    found = on_mesh(from_tokens_to_heads, x_BSNH, result=P("data", None, "context"))
    np.testing.assert_array_equal(found, x_BSNH[:, :, np.array(of_devices)])


def test_the_way_back_gives_each_device_its_tokens() -> None:
    x_BSNH = numbered(8)
    found = on_mesh(lambda x: from_heads_to_tokens(from_tokens_to_heads(x)), x_BSNH)
    np.testing.assert_array_equal(found, x_BSNH)


def test_a_device_has_the_positions_of_its_tokens() -> None:
    found = on_mesh(lambda x: own_positions(x.shape[1])[None] + 0 * x, jnp.zeros((2, 8), int))
    np.testing.assert_array_equal(found, [range(8)] * 2)


def test_dropout_of_tokens_has_the_mask_of_whole_sequences() -> None:
    def keys_of(x_BSD: Array) -> Dropout:
        row = jax.lax.axis_index("data") * len(x_BSD)
        return Dropout.of(0.3, jax.random.key(1), row + jnp.arange(len(x_BSD)))

    x_BSD = 1.0 + numbered(1).reshape(2, 8, 3)
    found = on_mesh(lambda x: keys_of(x).of_tokens(x), x_BSD)
    expected = Dropout.of(0.3, jax.random.key(1), jnp.arange(2))(x_BSD)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert 0 < np.count_nonzero(found) < x_BSD.size
