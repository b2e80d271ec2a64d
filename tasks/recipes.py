"""Portfolio recipes: what to train, in public literals only, read from a YAML file and checked at the door.

A recipe speaks in steps and public constants. Nothing in it may be computed from private data, utilities
included: the accountant takes these numbers as known to everybody.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from accounting.budget import LARGEST_EPSILON, LEAST_EPSILON
from accounting.errors import InvalidInput
from infra.canonical import canonical_json
from infra.documents import NetworkRecord, Relation
from infra.strict_document import Document, Name
from tasks.noise_choice import noise_of, with_defaults
from tasks.plain_yaml import parse_yaml

MAX_STEPS = 100_000  # far beyond what a portfolio trained step by step needs; catches a slipped zero


class DataRecipe(Document):
    """Which data loader to call, by import path (see tasks.data for what it must return)."""

    loader: str  # import path, "module:function"
    arguments: dict[str, Any] = Field(default_factory=dict)


class CandidateRecipe(Document):
    """One DP-SGD run: the noise on each step's sum has standard deviation noise_multiplier x max_grad_norm."""

    name: Name
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    noise_multiplier: Annotated[
        float, Field(gt=0)
    ]  # without noise, the digest of a model would give rows away
    max_grad_norm: Annotated[float, Field(gt=0)]
    clipping: Literal["flat"] = "flat"
    learning_rate: Annotated[float, Field(gt=0)]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    expected_batch_size: Annotated[float, Field(gt=0)]  # the public constant that each sum is divided by
    sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 is full batch
    # How good the model is expected to be, higher is better. Stated beforehand: never computed from private
    # records, nor from any model trained on them, for policies with `selection: stated` choose by it.
    utility: float | None = None

    @property
    def is_full_batch(self) -> bool:
        return self.sampling_probability == 1.0


class Recipe(Document):
    """A portfolio: independent runs from one public initialisation on one data set."""

    name: Name
    lineage: Name  # the records a person can be in, across regions, retrainings and policies
    unit: Literal["record"] = "record"
    neighboring_relation: Relation = "replace_one"
    data: DataRecipe
    network: NetworkRecord
    feature_radius: Annotated[float, Field(gt=0)]  # R: the loader projects each row to this L2 norm
    n_max: Annotated[int, Field(ge=1)]  # public, enforced cap on the private rows
    initialisation_seed: Annotated[int, Field(ge=0, lt=2**32)]  # public, shared by all candidates
    delta: Annotated[float, Field(gt=0, lt=1)]  # only for the epsilon shown beside each candidate
    public_twins: bool = (
        False  # score each candidate by its recipe, trained on public rows (tasks.public_twins)
    )
    candidates: Annotated[tuple[CandidateRecipe, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _names_once_one_utility_and_plain_arguments(self) -> Recipe:
        names = [candidate.name for candidate in self.candidates]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"candidate {name} is named twice; give each candidate its own name")
        stated = [candidate.name for candidate in self.candidates if candidate.utility is not None]
        if self.public_twins and stated:
            raise ValueError(
                f"candidate {stated[0]} states a utility although public_twins would measure it; remove one of them"
            )
        for what, arguments in (("data", self.data.arguments), ("network", self.network.arguments)):
            try:
                canonical_json(arguments)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{what}.arguments may hold texts, finite numbers, lists and mappings only"
                ) from None
        return self

    def candidate(self, name: str) -> CandidateRecipe:
        return next(candidate for candidate in self.candidates if candidate.name == name)


class WrittenCandidate(CandidateRecipe):
    """A candidate as its author wrote it: its noise stated, or left to a target."""

    noise_multiplier: Annotated[float, Field(gt=0)] | None = None  # type: ignore[assignment]
    # The run's own epsilon, nats, at the recipe's delta; or a name for one, see accounting.calibration.PRESETS.
    target_epsilon: Annotated[float, Field(ge=LEAST_EPSILON, le=LARGEST_EPSILON)] | None = None
    preset: Literal["strong", "medium", "weak"] | None = None


class WrittenRecipe(Recipe):
    """A recipe as its author wrote it."""

    candidates: Annotated[tuple[WrittenCandidate, ...], Field(min_length=1, max_length=64)]

    def resolved(self, where: str) -> Recipe:
        """The recipe with every noise multiplier as if it had been written, which is what is trained and digested.

        Raises:
            InvalidInput: one sentence that names the candidate without a choice, or whose target no noise meets.
        """
        candidates = []
        for candidate in self.candidates:
            fields = candidate.model_dump(exclude={"target_epsilon", "preset"})
            fields["noise_multiplier"] = noise_of(
                candidate, delta=self.delta, relation=self.neighboring_relation, where=where
            )
            candidates.append(CandidateRecipe(**fields))
        return Recipe(**{**dict(self), "candidates": tuple(candidates)})


def find_recipe(path: Path | str) -> Path:
    """Where a recipe file is: a relative path is looked for in the working directory, then beside the code.

    Raises:
        InvalidInput: it is in neither place.
    """
    home = Path(__file__).resolve().parent.parent
    for found in (Path(path), home / path):
        if found.is_file():
            return found.resolve()
    raise InvalidInput(f"There is no recipe file {path}, neither in {Path.cwd()} nor in {home}.")


def load_recipe(path: Path | str) -> Recipe:
    """Read and check a recipe file.

    Raises:
        InvalidInput: one sentence that names the file, and the candidate and the field at fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInput(f"The recipe {path} cannot be read: {reason}.") from None
    return parse_recipe(text, str(path))


def parse_recipe(text: str, where: str) -> Recipe:
    """Check the text of a recipe and find the noise for its targets; `where` names it in errors.

    Raises:
        InvalidInput: one sentence, see `load_recipe`.
    """
    fields = parse_yaml(text, where)
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is not a recipe: it must be a mapping with a name, data and candidates.")
    defaults = fields.pop("defaults", None) or {}
    candidates = fields.get("candidates")
    if not isinstance(defaults, dict):
        raise InvalidInput(f"{where}: defaults must be a mapping of fields shared by all candidates.")
    if "name" in defaults:
        raise InvalidInput(f"{where}: name cannot be shared by all candidates; remove it from defaults.")
    if not isinstance(candidates, dict):
        raise InvalidInput(f"{where}: candidates must be a mapping from each candidate's name to its fields.")
    for name, own in candidates.items():
        if not isinstance(own, dict | None):
            raise InvalidInput(f"{where}: candidate {name} must be a mapping of its fields.")
        if own and "name" in own:
            raise InvalidInput(f"{where}: candidate {name} is named by its key; remove its field name.")
    fields["candidates"] = tuple(
        {**with_defaults(name, own or {}, defaults, where), "name": name} for name, own in candidates.items()
    )
    try:
        written = WrittenRecipe.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(_sentence(where, error, candidates)) from None
    return written.resolved(where)


def _sentence(where: str, error: ValidationError, candidates: dict[str, Any]) -> str:
    """The first fault in words, with the candidate's name instead of its position; misspelt fields first."""
    faults = error.errors(include_url=False, include_context=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    location = [str(part) for part in fault["loc"]]
    owner = ""
    if len(location) > 1 and location[0] == "candidates":
        name = list(candidates)[int(location[1])]
        owner = f" of candidate {name}"
        location = location[2:]
        if location[0] not in {*(candidates[name] or {}), "name"} and fault["type"] != "missing":
            owner += " (from defaults)"
    field = ".".join(location)
    found = fault["input"]
    shown = found if isinstance(found, int | float) else repr(found)[:60]
    message = re.sub(r"^(Value error, |Input )", "", fault["msg"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown field {field}{owner}; check its spelling."
    if fault["type"] == "missing":
        return f"{where}: the field {field}{owner} is missing."
    if fault["type"] == "string_pattern_mismatch":
        message = "should be lower-case letters, digits and hyphens, at most 63"
    if not field:
        return f"{where}: {message}."
    return f"{where}: {field}{owner} {message}, but {shown} was given."
