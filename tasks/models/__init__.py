"""Networks: built from a record, started from public parameters, written as deterministic safetensors bytes.

**Bring your own.** A recipe names a factory by import path and its arguments; it returns a `torch.nn.Module`
that maps a batch of rows to one score a class or, where there are two classes, to one score: the logit of class 1
(see tasks.objective for the losses). What a score says about a row may depend on that row alone, so BatchNorm is
refused unless it is frozen: tasks.training.fitness tries every network before it is trained.
"""

from tasks.models.building import build, initial_state, network_with, state_bytes, state_from_bytes
from tasks.models.images import resnet18, small_cnn
from tasks.models.linear import is_regression, logistic_regression, softmax_regression
from tasks.models.multi_task import multi_task_network, task_network
from tasks.models.perceptron import multilayer_perceptron

__all__ = [
    "build",
    "initial_state",
    "is_regression",
    "logistic_regression",
    "multi_task_network",
    "multilayer_perceptron",
    "network_with",
    "resnet18",
    "small_cnn",
    "softmax_regression",
    "state_bytes",
    "state_from_bytes",
    "task_network",
]
