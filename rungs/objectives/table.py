"""The objective of each `objective` in `train.json`, and the compiled step of a run."""

from jax.sharding import Mesh

from rungs.config.train_config import TrainConfig
from rungs.objectives.distillation import Distillation
from rungs.objectives.kto import KTO
from rungs.objectives.masked_diffusion import MaskedDiffusion
from rungs.objectives.multi_token import MultiToken
from rungs.objectives.next_token import NextToken
from rungs.objectives.preferences import Preferences
from rungs.step.train_step import Step, make_step

OBJECTIVES: dict[str, type[NextToken]] = {
    "next_token": NextToken,
    "multi_token": MultiToken,
    "masked_diffusion": MaskedDiffusion,
    "dpo": Preferences,
    "ipo": Preferences,
    "simpo": Preferences,
    "kto": KTO,
    "distill": Distillation,
}


def objective_of(train: TrainConfig) -> NextToken:
    """Return the objective that `train.json` names."""
    return OBJECTIVES[train.objective](train)


def objective_without_teacher(train: TrainConfig) -> NextToken:
    """Return the objective for plans and checks, where distillation counts as next-token training:
    its activations are the same, and no teacher is there."""
    return NextToken(train) if train.objective == "distill" else objective_of(train)


def make_train_step(train: TrainConfig, mesh: Mesh | None = None) -> Step:
    """Return `make_step` for the run's objective: a function of (model, optimizer, inputs_ABS,
    targets_ABS) and, if documents are separate, starts_ABS as for `GPT.forward`."""
    return make_step(objective_without_teacher(train), train, mesh)
