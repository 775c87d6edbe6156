"""Training a model from a recipe."""

from nxd_trainer.training.run import TrainingDiverged, TrainResult, prepare_run, run_training, train

__all__ = ["train", "prepare_run", "run_training", "TrainResult", "TrainingDiverged"]
