"""Training a model from a recipe."""

from nxd_trainer.training.run import TrainResult, prepare_run, run_training, train

__all__ = ["train", "prepare_run", "run_training", "TrainResult"]
