"""Training a model from a recipe."""

from nxd_trainer.training.run import TrainResult, prepare_run, run_training, train
from nxd_trainer.training.saving import TrainingDiverged
from nxd_trainer.training.stop import StopRequest

__all__ = ["train", "prepare_run", "run_training", "StopRequest", "TrainResult", "TrainingDiverged"]
