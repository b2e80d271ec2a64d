"""DP-SGD with Opacus: one recipe entry in, one model with its trajectory as executed out."""

from tasks.training.loop import PRIVATE, TrainedCandidate, train_candidate
from tasks.training.recording import TrainingFailed

__all__ = ["PRIVATE", "TrainedCandidate", "TrainingFailed", "train_candidate"]
