"""Safetensors files written in parts."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rungs.checkpointing.weights_file import TensorSpec, TensorWriter, all_finite, bits
from tests.support.published_models import arrays


def test_tensors_are_written_in_any_order_and_in_parts(tmp_path: Path) -> None:
    specs = {
        "half": TensorSpec("bfloat16", (3,)),
        "stacked": TensorSpec("float32", (2, 2, 3)),
        "scalar": TensorSpec("float32", ()),
    }
    half = np.arange(3).astype(ml_dtypes.bfloat16)
    stacked = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    with TensorWriter(tmp_path / "model.safetensors", specs, {"format": "pt"}) as writer:
        writer.write("scalar", np.asarray(7, np.float32))
        for index in ((1, 1), (0, 1), (1, 0), (0, 0)):
            writer.write("stacked", stacked[index], index)
        writer.write("half", half.view(np.uint16))
    found = arrays(tmp_path)
    np.testing.assert_array_equal(found["stacked"], stacked)
    np.testing.assert_array_equal(found["half"], half)
    assert found["scalar"] == 7


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_element_that_is_not_finite_is_found_anywhere(dtype: type) -> None:
    values: np.ndarray = np.zeros((3, 200_000), dtype)
    limits = ml_dtypes.finfo(dtype)
    values[0, :4] = limits.max, limits.min, limits.smallest_subnormal, -0.0
    name = np.dtype(dtype).name
    assert all_finite(values, name)
    assert all_finite(bits(values).T, name)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        broken = values.copy()
        broken[2, -1] = bad
        assert not all_finite(broken, name)
        assert not all_finite(bits(broken).T, name)
