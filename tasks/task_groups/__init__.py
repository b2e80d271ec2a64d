"""Groups of tasks: models trained apart on private data of their own, merged into one model of all tasks.

The tasks share a trunk and one public start of it; each has a head of its own. What is merged is the trunk; heads
are kept as they were trained. A group is trained by its recipe (`load_group`), its rows are those of all tasks
beside one another (`load_tasks`), and `merge_tasks` is what the policy flow merges a candidate of each task by.
"""

from tasks.task_groups.merging import merge_tasks
from tasks.task_groups.recipes import Group, Pretrain, Start, TaskRecipe, load_group, parse_group
from tasks.task_groups.rows import load_tasks, rows_of_task, task_network_of

__all__ = [
    "Group",
    "Pretrain",
    "Start",
    "TaskRecipe",
    "load_group",
    "load_tasks",
    "merge_tasks",
    "parse_group",
    "rows_of_task",
    "task_network_of",
]
