"""Recipe files: found, read, and checked at the door; one sentence names the candidate and the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from accounting.errors import InvalidInput
from tasks.noise_choice import with_defaults
from tasks.plain_yaml import parse_yaml
from tasks.recipes.documents import Recipe, WrittenRecipe


def find_recipe(path: Path | str) -> Path:
    """Where a recipe file is: a relative path is looked for in the working directory, then beside the code.

    Raises:
        InvalidInput: it is in neither place.
    """
    home = Path(__file__).resolve().parents[2]
    for found in (Path(path), home / path):
        if found.is_file():
            return found.resolve()
    raise InvalidInput(f"There is no recipe file {path}, neither in {Path.cwd()} nor in {home}.")


def load_recipe(path: Path | str) -> Recipe:
    """Read and check a recipe file.

    Raises:
        InvalidInput: one sentence that names the file, and the candidate and the field at fault.
    """
    return parse_recipe(text_of(path), str(path))


def text_of(path: Path | str) -> str:
    """The text of a recipe file.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInput(f"The recipe {path} cannot be read: {reason}.") from None


def parse_recipe(text: str, where: str) -> Recipe:
    """Check the text of a recipe and find the noise for its targets; `where` names it in errors.

    Raises:
        InvalidInput: one sentence, see `load_recipe`.
    """
    fields = parse_yaml(text, where)
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where} is not a recipe: it must be a mapping with a name, data and candidates.")
    if "tasks" in fields:
        raise InvalidInput(
            f"{where} is the recipe of a group of tasks: train it with `remerge merge-tasks {where}`."
        )
    return recipe_of(fields, where)


def recipe_of(fields: dict[str, Any], where: str) -> Recipe:
    """`parse_recipe` of what a recipe file says.

    Raises:
        InvalidInput: one sentence, see `load_recipe`.
    """
    fields = _without_shorthand(fields, where)
    defaults = fields.pop("defaults", None) or {}
    candidates = fields.get("candidates")
    if not isinstance(defaults, dict):
        raise InvalidInput(f"{where}: defaults must be a mapping of fields shared by all candidates.")
    if "name" in defaults:
        raise InvalidInput(f"{where}: name cannot be shared by all candidates; remove it from defaults.")
    if not isinstance(candidates, dict):
        raise InvalidInput(f"{where}: candidates must be a mapping from each candidate's name to its fields.")
    if not candidates:
        raise InvalidInput(f"{where}: candidates is empty; give at least one.")
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
        raise InvalidInput(sentence_of(where, error, candidates)) from None
    return written.resolved(where)


def _without_shorthand(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`data: module:function` and `model: module:function`, written out; `model` is another word for `network`."""
    if "model" in fields and "network" in fields:
        raise InvalidInput(f"{where} gives both model and network, which are the same; keep one of them.")
    fields = {"network" if key == "model" else key: value for key, value in fields.items()}
    for key, inner in (("data", "loader"), ("network", "factory")):
        if isinstance(fields.get(key), str):
            fields[key] = {inner: fields[key]}
    return fields


def sentence_of(where: str, error: ValidationError, candidates: Mapping[str, Any]) -> str:
    """The first fault in words, with the candidate's name instead of its position; misspelt fields first."""
    faults = error.errors(include_url=False, include_context=False)
    fault = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    location = [str(part) for part in fault["loc"]]
    owner = ""
    if len(location) > 1 and location[0] == "candidates":
        name = list(candidates)[int(location[1])]
        owner = f" of candidate {name}"
        location = location[2:]
        if not location:  # a rule that joins several of its fields
            return f"{where}: candidate {name}: {fault['msg'].removeprefix('Value error, ')}."
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
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "must be a mapping of its fields"
    if location[-1:] == ["[key]"]:
        field = f"the name {location[-2]!r} in {'.'.join(location[:-2])}"
    if fault["type"] == "string_pattern_mismatch":
        message = "should be lower-case letters, digits and hyphens, at most 63"
    if not field:
        return f"{where}: {message}."
    return f"{where}: {field}{owner} {message}, but {shown} was given."
