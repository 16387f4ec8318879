"""The parts of a GPU session, in order of worth."""

from typing import Any, NamedTuple

from benchmarks.gpu_parts.setting import Setting


class Part(NamedTuple):
    """Something to measure."""

    module: str
    """Its `figures(setting)` yields what it measures."""
    what: str
    gpu_seconds: float
    """How long it takes on a GPU that has compiled nothing before."""
    rehearsal_seconds: float
    """How long it takes on two CPU cores."""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def has_steps(self) -> bool:
        """Whether what the autotuner chose for it is worth keeping."""
        return self.name in ("step", "microbatches", "llama", "llama_float8", "variants")

    def seconds(self, setting: Setting) -> float:
        return self.rehearsal_seconds if setting.rehearse else self.gpu_seconds


def _part(name: str, *rest: Any) -> Part:
    return Part(f"benchmarks.gpu_parts.{name}", *rest)


_PARTS = [
    _part("kernels", "every kernel beside its plain form, and versions", 90, 15),
    _part("peaks", "the fastest matmuls, and memory bandwidth", 60, 15),
    _part("step", "GPT-2's step, beside PyTorch with the largest microbatch that fits", 150, 40),
    _part("microbatches", "GPT-2's step, microbatches of 8, 32 and 96", 130, 20),
    _part("profile", "where the time of that step goes", 60, 10),
    _part("attention", "attention by each kernel, by shape", 90, 5),
    _part("llama", "the step of a Llama of 1.1B parameters", 60, 10),
    _part("llama_float8", "that step in FP8", 60, 20),
    _part("generation", "1, 8 and 64 texts, beside transformers", 120, 20),
    _part("reinforcement", "seconds per step, and the share of sampling", 90, 30),
    _part("resume", "killed and resumed, bit for bit", 110, 40),
    _part("checkpoint", "how long a checkpoint holds up training", 40, 8),
    _part("start", "a cold and a warm start", 110, 20),
    _part("a_to_a", "A-to-A on 92.16 million tokens", 120, 15),
    _part("answers", "reinforcement learning on sort and countdown, by minute", 240, 40),
    _part("race", "the recipe for 2.2 minutes with three seeds, and PyTorch's loss", 600, 90),
]
PARTS = {part.name: part for part in _PARTS}
"""By name, the most valuable first."""
VARIANTS = _part("variants", "variants of GPT-2's step, by turns", 180, 30)
"""Measured only if `--variant` names some."""
