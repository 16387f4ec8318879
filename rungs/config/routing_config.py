"""`expert_routing` in `model.json`."""

from collections.abc import Iterator
from typing import Literal

from rungs.common.strict_json import StrictModel, check
from rungs.config.base import Positive, Size


class RoutingConfig(StrictModel):
    """How a mixture of experts chooses the experts of a token, and weights them."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's outputs: softmax over all experts, or sigmoid of each
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    router_bias: bool = False
    """Whether the router has a bias (GPT-OSS)."""
    balance_bias: bool = False
    """Balance experts by biases instead of a loss (Wang et al. 2024, arXiv 2408.15664): they are
    added to the scores by which experts are chosen, not to the weights, and change after each step
    by balance_bias_rate of `train.json`. They are saved like weights, and not trained by the
    optimizer; with lora, they stay."""
    groups: Size | None = None
    """Experts are in so many groups of equal size, and a token's are from groups_per_token of them
    (DeepSeek-V2, section 2.1.2). A group's score is that of its best expert or, with sigmoid
    scores, the sum of its best two."""
    groups_per_token: Size | None = None
    """How many groups a token's experts may be from."""
    weight_factor: Positive = 1.0
    """Factor on the weights of a token's experts, after normalize_expert_weights."""

    @check
    def _groups_fit(self) -> Iterator[str]:
        groups, each = self.groups, self.groups_per_token
        if (groups is None) != (each is None):
            yield "groups and groups_per_token: give both or neither"
        elif groups and each and each > groups:
            yield f"groups_per_token: {each} is above groups {groups}"
