"""Training on tokens by any objective of `train.json`: a new one is a class here and one in
`rungs/step/train_step.py`; another loss of preferences is a function in `rungs/step/preferences.py`
and its name here."""

from pathlib import Path

from rungs.config.train_config import TrainConfig
from rungs.step.train_step import objective_of
from rungs.training.distillation import DistillationLearner
from rungs.training.learner import Kind
from rungs.training.next_token import NextTokenLearner, next_token
from rungs.training.preferences import PreferenceLearner

LEARNERS: dict[str, type[NextTokenLearner]] = {
    "next_token": NextTokenLearner,
    "dpo": PreferenceLearner,
    "ipo": PreferenceLearner,
    "simpo": PreferenceLearner,
    "distill": DistillationLearner,
}


def training(datasets_dir: Path) -> Kind:
    """Return training on datasets in a folder as a kind of run."""
    return next_token(datasets_dir, objective_of, learner_of)


def learner_of(train: TrainConfig) -> type[NextTokenLearner]:
    """Return the class that takes the steps of a run."""
    return LEARNERS[train.objective]
