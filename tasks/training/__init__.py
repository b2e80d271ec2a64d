"""DP-SGD with Opacus: one recipe entry in, one model with its trajectory as executed out."""

from tasks.training.candidate import train_candidate, try_networks
from tasks.training.checkpoints import Checkpoint, resume_key
from tasks.training.history import library_versions
from tasks.training.monitors import PRIVATE
from tasks.training.recording import TrainingFailed
from tasks.training.run import TrainedCandidate

__all__ = [
    "PRIVATE",
    "Checkpoint",
    "TrainedCandidate",
    "TrainingFailed",
    "library_versions",
    "resume_key",
    "train_candidate",
    "try_networks",
]
