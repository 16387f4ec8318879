"""What races: run folders of Rungs, and a script for PyTorch, at a size for the device."""

from typing import Any, NamedTuple

PYTORCH, GPT2, RECIPE = "pytorch", "rungs-gpt2", "rungs-recipe"
NAMES = (GPT2, RECIPE, PYTORCH)
VALIDATIONS = 10
"""In a race."""


class Size(NamedTuple):
    """A size of the models, and of a step."""

    vocab: int
    length: int
    width: int
    heads: int
    layers: int
    microbatch: int
    microbatches: int
    validation: int
    """Sequences of a validation."""
    rates: dict[str, float]
    """Learning rate of each side; `--rates` tries others."""

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.microbatch * self.microbatches


SIZES = {
    "cpu": Size(8192, 256, 256, 4, 4, 8, 1, 128, {GPT2: 1e-3, RECIPE: 1e-2, PYTORCH: 1e-3}),
    "gpu": Size(
        32768, 1024, 768, 12, 12, 48, 1, 512, {GPT2: 1.2e-3, RECIPE: 1e-2, PYTORCH: 1.2e-3}
    ),
    "rehearsal": Size(512, 64, 64, 4, 2, 4, 1, 16, {GPT2: 2e-3, RECIPE: 1e-2, PYTORCH: 2e-3}),
}


class Entry(NamedTuple):
    """A side of a race with a seed."""

    side: str
    minutes: float
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """Name of its folder or file."""
        return f"{self.side}-{self.minutes:g}min-{self.rate:g}-seed{self.seed}"


def configs(entry: Entry, size: Size) -> tuple[dict[str, Any], ...]:
    """Return model.json and train.json of a side of Rungs."""
    model: dict[str, Any] = {
        "vocab_size": size.vocab,
        "context_length": size.length,
        "emb_dim": size.width,
        "n_layers": size.layers,
        "n_heads": size.heads,
    }
    train: dict[str, Any] = {
        "dataset": "race",
        "max_minutes": entry.minutes,
        "epochs": 1000,
        "shuffle": True,
        "seed": entry.seed,
        "microbatch_size": size.microbatch,
        "gradient_accumulation_steps": size.microbatches,
        "validation_tokens": size.validation * size.length,
        "validation_minutes": entry.minutes / VALIDATIONS,
        "checkpoint_interval": 1_000_000,
        "learning_rate": entry.rate,
        "warmup_period_percent": 5,
        "min_learning_rate_percent": 0,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "clipping_max_norm": 1.0,
    }
    if entry.side == RECIPE:
        model |= RECIPE_MODEL
        train |= RECIPE_TRAIN
    return model, train


RECIPE_MODEL: dict[str, Any] = {
    "positions": "rope",
    "norm": "rms_norm",
    "norm_parameters": False,
    "embedding_norm": True,
    "qk_norm": True,
    "feed_forward": "relu_squared",
    "ffn_bias": False,
    "attention_output_bias": False,
    "zero_init_residual": True,
    "residual_scalars": True,
    "value_embedding_every": 2,
}
RECIPE_TRAIN: dict[str, Any] = {
    "optimizer": "muon",
    "orthogonalization": "polar_express",
    "normuon_beta2": 0.95,
    "cautious_weight_decay": True,
    "schedule": "warmup_stable_decay",
    "decay_period_percent": 40,
    "warmup_period_percent": 1,
    "learning_rate_multipliers": {"embedding": 3, "head": 0.3, "embedding_skip": 10},
}
