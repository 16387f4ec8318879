"""The model that predicts beside each step of a run that learns from a teacher."""

from rungs.checkpointing.checkpoint_folder import find_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common import paths
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.train_config import TrainConfig
from rungs.run.folder import existing_run_path


def model_beside(train: TrainConfig) -> ModelConfig | None:
    """Return the config of a run's teacher, which may be a run that isn't trained yet; None without
    one, or if its predictions are stored. Raises UserError if it isn't there."""
    if train.teacher is None or train.teacher_top_k:
        return None
    run = existing_run_path(train.teacher)
    if run and paths.is_file(run / run_config.MODEL_FILE):
        return run_config.load_any_run(run).model
    return Weights(find_weights(train.teacher)).header.model
