"""How well models of several tasks merged, and why not better.

Whatever is here is computed from models and *public* rows. The models themselves are private until they are released:
a figure about them is covered by a guarantee for all of them together (the joint release, or parallel tasks), and by
no guarantee that is finer than that, such as those of linear combinations. It belongs where such models may lie.

- merge gap: how much accuracy a task loses when its own model is replaced by the merge;
- sharpness: how much a task's loss rises at the worst point of a small ball, to first order;
- reference drift: how far a task's parameters went from the public start;
- cosines of task vectors: whether two tasks pulled the shared parameters the same way;
- loss along the path: from a task's own model straight to the merge.
"""

from tasks.diagnostics.diagnosing import Diagnosis, TaskDiagnosis, TaskModels, diagnose
from tasks.diagnostics.geometry import cosines, drift, task_vector
from tasks.diagnostics.losses import Score, score, sharpness
from tasks.diagnostics.paths import PathPoint, along_path
from tasks.diagnostics.plots import draw_cosines, draw_paths, pages
from tasks.diagnostics.words import section

__all__ = [
    "Diagnosis",
    "PathPoint",
    "Score",
    "TaskDiagnosis",
    "TaskModels",
    "along_path",
    "cosines",
    "diagnose",
    "draw_cosines",
    "draw_paths",
    "drift",
    "pages",
    "score",
    "section",
    "sharpness",
    "task_vector",
]
