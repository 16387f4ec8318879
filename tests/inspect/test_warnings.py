"""Which attention logits are warned of, and what to do about them."""

import numpy as np

from rungs.inspect.watch import attention_warning
from rungs.run import layer_record
from tests.support.configs import model_config


def row(*largest_L: float) -> layer_record.Rows:
    """A row with three heads per layer, the second of which has the largest logit."""
    logits_LN = np.array([[1.0, largest, -5.0] for largest in largest_L])
    return layer_record.row_of(0, {"heads": {"largest_logit": logits_LN}})


def warning(before: layer_record.Rows | None, now: layer_record.Rows, **model: object) -> str:
    return attention_warning(model_config(**model), before, now) or ""


def test_a_layer_is_warned_of_once_at_each_limit() -> None:
    assert warning(None, row(10, 999.0)) == ""
    assert warning(None, row(10, 1001.0)).startswith("layer 1's attention logits grow: the largest")
    assert warning(row(10, 999), row(10, 1234.4)).startswith(
        "layer 1's attention logits grow: the largest is 1,234, above 1,000; start another run"
    )
    assert warning(row(10, 1001), row(10, 5000)) == ""
    assert "10,500, above 10,000" in warning(row(10, 5000), row(10, 10_500))
    assert "above 10,000" in warning(row(10, 10), row(10, 20_000))
    assert warning(row(10, 20_000), row(10, 900)) == ""


def test_the_worst_of_several_layers_is_named() -> None:
    found = warning(row(5, 5, 5), row(1500, 3000, 7))
    assert found.startswith("layer 1's attention logits grow (and those of 1 other layer): ")


def test_values_that_are_not_finite_are_no_growth() -> None:
    assert warning(row(5, 5), row(np.nan, np.inf)) == ""
    assert "layer 0" in warning(row(np.nan, np.inf), row(2000, 5))


def test_advice_fits_the_model() -> None:
    grown = row(2000, 5)
    assert warning(None, grown).endswith(
        '; start another run with "qk_norm": true or "attention_soft_cap": 50 in its model.json,'
        " or lower learning_rate"
    )
    assert "attention_soft_cap" in warning(None, grown, qk_norm=True)
    assert '"qk_norm"' not in warning(None, grown, qk_norm=True)
    assert warning(None, grown, qk_norm=True, attention_soft_cap=5000.0).endswith(
        "above 1,000; lower learning_rate"
    )


def test_a_model_without_heads_has_no_warning() -> None:
    assert attention_warning(model_config(), None, layer_record.row_of(0, {})) is None
