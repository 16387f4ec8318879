"""`latent_attention` in `model.json`."""

from typing import Literal

from rungs.common.strict_json import StrictModel
from rungs.config.base import Size


class LatentConfig(StrictModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of
    all heads are made from one short vector per token, the latent. A generator's cache holds it,
    and a rotated key that all heads share, instead of keys and values."""

    kv_rank: Size
    """Width of the latent, which has an RMS norm."""
    query_rank: Size | None = None
    """Width of a normalized latent from which queries are made. Absent: they are made from
    attention's input."""
    rope_dim: Size
    """Width of the rotated part that each query and the shared key have beside the head_dim
    elements without positions (decoupled rotary positions)."""
    value_dim: Size | None = None
    """Width of a head's values, at most head_dim + rope_dim. Absent: head_dim."""
    rope_pairs: Literal["halves", "neighbors"] = "halves"
    """Which elements rotate together: one of each half, as in Llama, or neighbors (DeepSeek)."""
