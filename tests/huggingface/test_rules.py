"""Rules of tensors that join several parameters, against what a PyTorch Linear computes."""

import numpy as np

from rungs.huggingface.families.family import linear
from rungs.huggingface.tensors import AbstractParameter, TensorGroup

QUERY, KEY = AbstractParameter((3, 6, 4, 2), inputs=1), AbstractParameter((3, 6, 1, 2), inputs=1)


def test_a_joined_linear_has_the_outputs_of_its_modules_in_order() -> None:
    rng = np.random.default_rng(0)
    query_IHD, key_IHD = (rng.normal(size=like.shape[1:]) for like in (QUERY, KEY))
    weight, bias = linear("layers.{layer}.qk", "query", "key")
    assert (weight.hf_name, bias.hf_name) == ("layers.{layer}.qk.weight", "layers.{layer}.qk.bias")
    assert (weight.parameters, bias.parameters) == (
        ("query.kernel", "key.kernel"),
        ("query.bias", "key.bias"),
    )
    group = TensorGroup(weight, {"query.kernel": QUERY, "key.kernel": KEY})
    joined_OI = group.join([query_IHD, key_IHD])
    assert joined_OI.shape == group.shape == (10, 6)
    x_I = rng.normal(size=6)
    y_O = joined_OI @ x_I
    np.testing.assert_allclose(y_O[:8].reshape(4, 2), np.einsum("i,ihd->hd", x_I, query_IHD))
    np.testing.assert_allclose(y_O[8:].reshape(1, 2), np.einsum("i,ihd->hd", x_I, key_IHD))
    for part, whole in zip(group.split(joined_OI), (query_IHD, key_IHD), strict=True):
        np.testing.assert_array_equal(part, whole)
