"""Recipes of groups: several tasks, each with private data of its own, trained from one public start.

Read from YAML files as portfolio recipes are, and in public literals only, as those. `Group.recipe_of` says what one
task's candidates are trained by: an ordinary recipe, whose network is the shared trunk with the task's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from accounting.errors import InvalidInput
from infra.canonical import canonical_json
from infra.documents import NetworkRecord, Relation
from infra.strict_document import Document, Name
from tasks.models.multi_task import MULTI_TASK_NETWORK, TASK_NETWORK
from tasks.plain_yaml import parse_yaml
from tasks.recipes import CandidateRecipe, DataRecipe, Execution, Recipe
from tasks.recipes.files import recipe_of, sentence_of, text_of

_SHARED = (  # fields that every task's recipe has from the group
    "name",
    "lineage",
    "unit",
    "neighboring_relation",
    "feature_radius",
    "n_max",
    "delta",
    "public_twins",
    "execution",
)


class Pretrain(Document):
    """Ordinary training without privacy on the tasks' public-train rows: it costs no privacy, and is repeatable."""

    steps: Annotated[int, Field(ge=1, le=1_000_000)]
    learning_rate: Annotated[float, Field(gt=0, le=1e6)]  # of Adam
    batch_size: Annotated[int, Field(ge=1)]  # rows a step, drawn by the seed
    seed: Annotated[int, Field(ge=0, lt=2**32)]  # of the parameters before it, and of the batches


class Start(Document):
    """Where all candidates start from, which anybody may know: random parameters, perhaps trained on public rows."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    pretrain: Pretrain | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.seed is None) == (self.pretrain is None):
            raise ValueError("needs either a seed or pretrain, which brings its own")
        return self

    @property
    def any_seed(self) -> int:
        """Of the random parameters."""
        return self.pretrain.seed if self.pretrain is not None else self.seed or 0


class TaskRecipe(Document):
    """One task: its data, and the candidates trained on them."""

    data: DataRecipe
    classes: Annotated[int, Field(ge=2)]  # labels that the data have, and scores that the head gives
    candidates: Annotated[tuple[CandidateRecipe, ...], Field(min_length=1, max_length=64)]


class Group(Document):
    """Tasks that are trained apart and merged over the trunk that they share, each keeping its head."""

    name: Name
    lineage: Name  # of the group: the records a person can be in, in whichever task
    unit: Literal["record"] = "record"
    neighboring_relation: Relation = "replace_one"
    # disjoint: no record is in two tasks, which is checked; shared: it may be in all of them.
    records: Literal["disjoint", "shared"]
    trunk: NetworkRecord
    width: Annotated[int, Field(ge=1)]  # numbers that the trunk gives a row
    feature_radius: Annotated[float, Field(gt=0)] | None  # as in a portfolio recipe, for every task
    n_max: Annotated[int, Field(ge=1)]  # public, enforced cap on the private rows of all tasks together
    initialisation: Start
    delta: Annotated[float, Field(gt=0, lt=1)]  # only for the epsilon shown beside each candidate
    public_twins: bool = False
    execution: Execution = Field(default_factory=Execution)
    tasks: Annotated[dict[Name, TaskRecipe], Field(min_length=2, max_length=64)]

    @model_validator(mode="after")
    def _names_once_and_plain_arguments(self) -> Self:
        owners: dict[str, str] = {}
        for task, recipe in self.tasks.items():
            for name in (name for one in recipe.candidates for name in (one.name, *one.kept_names)):
                if name in owners:
                    raise ValueError(
                        f"candidate {name} is named by the tasks {owners[name]} and {task}; give each its own name"
                    )
                owners[name] = task
        if self.public_twins and self.initialisation.pretrain is not None:
            raise ValueError(
                "public_twins would score candidates on public rows that pretrain had seen; remove one of them"
            )
        try:
            canonical_json(self.trunk.arguments)
        except (TypeError, ValueError):
            raise ValueError(
                "trunk.arguments may hold texts, finite numbers, lists and mappings only"
            ) from None
        return self

    @model_serializer(mode="wrap")
    def _without_execution(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """How a training is carried out is part of the digest only where the recipe says it, as in portfolios."""
        fields: dict[str, Any] = write(self)
        return {
            name: value
            for name, value in fields.items()
            if name != "execution" or self.execution != Execution()
        }

    @property
    def candidates(self) -> tuple[CandidateRecipe, ...]:
        """Those of all tasks, task after task."""
        return tuple(candidate for task in self.tasks.values() for candidate in task.candidates)

    def recipe_of(self, task: str) -> Recipe:
        """What one task's candidates are trained by."""
        own = self.tasks[task]
        return Recipe(
            **{name: getattr(self, name) for name in _SHARED},
            data=own.data,
            network=task_network_record(self.trunk, task, own.classes, self.width),
            initialisation_seed=self.initialisation.any_seed,
            candidates=own.candidates,
        )

    def network(self, shape: tuple[int, ...]) -> NetworkRecord:
        """What the merged model is: the trunk with the heads of all tasks.

        Args:
            shape: of a row of any task.
        """
        arguments = {
            "trunk": self.trunk.model_dump(mode="json"),
            "heads": {task: own.classes for task, own in sorted(self.tasks.items())},
            "width": self.width,
            "shape": list(shape),
        }
        return NetworkRecord(factory=MULTI_TASK_NETWORK, arguments=arguments)


def task_network_record(trunk: NetworkRecord, task: str, classes: int, width: int) -> NetworkRecord:
    """The network of one task's candidates."""
    arguments = {
        "trunk": trunk.model_dump(mode="json"),
        "task": task,
        "classes": classes,
        "width": width,
    }
    return NetworkRecord(factory=TASK_NETWORK, arguments=arguments)


def load_group(path: Path | str) -> Group:
    """Read and check the recipe file of a group.

    Raises:
        InvalidInput: one sentence that names the file, and the task, the candidate and the field at fault.
    """
    return parse_group(text_of(path), str(path))


def parse_group(text: str, where: str) -> Group:
    """Check the text of a group's recipe; `where` names it in errors.

    Raises:
        InvalidInput: one sentence, see `load_group`.
    """
    fields = parse_yaml(text, where)
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is not a recipe: it must be a mapping with a name, a trunk and tasks.")
    if "tasks" not in fields:
        raise InvalidInput(
            f"{where} names no tasks: a group needs at least two; a portfolio of one task is trained with "
            "`remerge train`."
        )
    if isinstance(fields.get("trunk"), str):
        fields["trunk"] = {"factory": fields["trunk"]}
    tasks, defaults = fields["tasks"], fields.pop("defaults", None) or {}
    if not isinstance(tasks, dict) or len(tasks) < 2:
        raise InvalidInput(f"{where}: tasks must be a mapping from the names of at least two tasks to them.")
    # First the group itself, with any task in its place: a fault of its own is no task's.
    stand_in = TaskRecipe.model_construct(data=DataRecipe(loader="any:loader"), classes=2, candidates=())
    try:
        frame = Group.model_validate({**fields, "tasks": dict.fromkeys(tasks, stand_in)})
    except ValidationError as error:
        raise InvalidInput(sentence_of(where, error, {})) from None
    own = {name: _task(frame, name, task, defaults, f"{where}: task {name}") for name, task in tasks.items()}
    try:
        return Group.model_validate({**dict(frame), "tasks": own})
    except ValidationError as error:
        raise InvalidInput(sentence_of(where, error, {})) from None


def _task(frame: Group, name: str, fields: Any, defaults: Any, where: str) -> TaskRecipe:
    if not isinstance(fields, Mapping):
        raise InvalidInput(f"{where} must be a mapping with data, classes and candidates.")
    unknown = sorted(set(fields) - {"data", "classes", "defaults", "candidates"})
    if unknown:
        raise InvalidInput(f"{where}: unknown field {unknown[0]}; check its spelling.")
    missing = [field for field in ("data", "classes", "candidates") if field not in fields]
    if missing:
        raise InvalidInput(f"{where}: the field {missing[0]} is missing.")
    classes, own_defaults = fields["classes"], fields.get("defaults") or {}
    if type(classes) is not int or classes < 2:
        raise InvalidInput(
            f"{where}: classes must be a whole number of at least 2, but {classes!r} was given."
        )
    if not isinstance(defaults, dict) or not isinstance(own_defaults, dict):
        raise InvalidInput(f"{where}: defaults must be a mapping of fields shared by all candidates.")
    recipe = recipe_of(
        {
            **frame.model_dump(include=set(_SHARED), exclude_defaults=True),
            "data": fields["data"],
            "network": task_network_record(frame.trunk, name, classes, frame.width).model_dump(),
            "initialisation_seed": frame.initialisation.any_seed,
            "defaults": with_own(defaults, own_defaults),
            "candidates": fields["candidates"],
        },
        where,
    )
    return TaskRecipe(data=recipe.data, classes=classes, candidates=recipe.candidates)


def with_own(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A task's shared fields over the group's; its own choice of noise replaces one of any kind."""
    from tasks.noise_choice import CHOICES

    chosen = any(own.get(choice) is not None for choice in CHOICES)
    return {**{key: value for key, value in defaults.items() if not (chosen and key in CHOICES)}, **own}
