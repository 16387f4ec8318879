"""The path of the repository and its committed run folders. `runs/` also holds the user's own runs,
so no test may list that folder."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (
    *("a-to-a", "a-to-a-fineweb", "attention", "experts", "feed-forward", "gemma", "gpt2-small"),
    *("layers", "llama", "mistral", "mixtral", "multi-head", "muon", "mup", "mup-rate"),
    *("next-token", "norm", "parity-dpo", "parity-pretrain", "qk-norm", "rope", "swiglu"),
    *("calculator-pretrain", "countdown-pretrain", "guess-pretrain", "sort-pretrain"),
    *("bare-norm", "embedding-norm", "group-rates", "late-decay", "normuon", "recipe"),
    *("relu-squared", "residual-scalars", "small-recipe", "value-embeddings", "zero-init"),
    *("deepseek", "distilled", "gpt-oss", "hybrid", "latent", "masked-diffusion", "multi-token"),
    "student",
)
COMMITTED_RUNS = [ROOT / "runs" / name for name in NAMES]
"""Those of training."""
REINFORCEMENT_RUNS = [
    ROOT / "runs" / name
    for name in ("calculator-rl", "countdown-rl", "guess-rl", "parity-opd", "parity-rl", "sort-rl")
]
