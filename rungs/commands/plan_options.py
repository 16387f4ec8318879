"""The options of `plan.py`, checked."""

import math
import re
from pathlib import Path
from typing import NamedTuple, cast, get_args

from rungs.common.errors import UserError
from rungs.config.option_values import UTILIZATION_PERCENT
from rungs.config.sharding_config import Mode, ShardingConfig, mode_problem

_SHARDING = re.compile(rf"({'|'.join(get_args(Mode))}):([0-9]{{1,6}})(?:x([0-9]{{1,6}}))?")


class PlanOptions(NamedTuple):
    """What the options of `plan.py` ask for."""

    run: str
    device: str | None
    """None for this machine's."""
    sharding: ShardingConfig | None
    """None for that of the run's config."""
    utilization: float | None
    """In percent of the peak FLOP/s."""
    tokens_per_second: float | None
    budget: float | None
    """FLOPs of a ladder's largest run; None to plan the run itself."""
    rungs: int | None
    into: Path | None
    is_compiled: bool
    has_roofline: bool
    price_per_hour: float | None
    as_json: bool
    datasets_dir: Path | None

    @property
    def is_as_recorded(self) -> bool:
        """Whether the run's own measured speed holds for the plan."""
        return self.device is None and self.sharding is None and self.utilization is None

    @property
    def utilized_share(self) -> float:
        """The share of the peak FLOP/s that is given, or else assumed."""
        return (self.utilization or UTILIZATION_PERCENT) / 100

    def check(self) -> None:
        """Raise UserError if options don't go together."""
        if self.budget is None and (self.rungs or self.into):
            raise UserError("--rungs and --into need --ladder")
        if self.has_roofline and not self.is_compiled:
            raise UserError("--roofline needs --compile")
        if self.is_compiled and self.budget is not None:
            raise UserError("--compile: compile one run; leave out --ladder")
        if self.price_per_hour is not None and self.budget is not None:
            raise UserError("--price-per-hour: gives the cost of one run; leave out --ladder")
        numbers = self.utilization, self.tokens_per_second, self.budget, self.price_per_hour
        if not all(math.isfinite(given or 0) for given in numbers):
            raise UserError(
                "--utilization, --tokens-per-second, --ladder and --price-per-hour need finite"
                " numbers"
            )

    def check_for_policy(self) -> None:
        """Raise UserError for options that a run of reinforcement learning doesn't have."""
        if self.tokens_per_second or self.budget or self.is_compiled or self.price_per_hour:
            raise UserError(
                "--tokens-per-second, --ladder, --compile and --price-per-hour: not for runs of"
                " reinforcement learning"
            )


def parse_sharding(text: str) -> ShardingConfig:
    """Return the sharding of `--sharding`, with both sizes given.

    Raises:
        UserError: the text is not a sharding.
    """
    match = _SHARDING.fullmatch(text)
    if match is None:
        raise UserError(f"--sharding {text}: give it as dp:8, fsdp:8, tp:8, fsdp_tp:4x2 or cp:8")
    mode, *given = match.groups()
    sizes = int(given[0]), int(given[1] or 1)
    if mode in ("tp", "cp") and given[1] is None:
        sizes = 1, sizes[0]
    if min(sizes) < 1:
        raise UserError(f"--sharding {text}: needs at least one device")
    if line := mode_problem(mode, *sizes):
        raise UserError(f"--sharding {text}: {line}")
    return ShardingConfig.of(cast(Mode, mode), sizes)
