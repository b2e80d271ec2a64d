"""Reading a YAML or JSON file that a person wrote: no key twice, numbers as they look, one-sentence errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from accounting.errors import InvalidInput


def read_mapping(path: Path | str) -> dict[str, Any]:
    """The mapping in a file: JSON where its name ends in .json, YAML otherwise.

    Raises:
        InvalidInput: one sentence that names the file, and the line where the text cannot be parsed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInput(f"{path} cannot be read: {reason}.") from None
    parse = parse_json if str(path).lower().endswith(".json") else parse_yaml
    fields = parse(text, str(path))
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path} must hold a mapping of field names to values at its top.")
    return fields


def parse_yaml(text: str, where: str) -> Any:
    """Safe YAML; `where` names it in errors."""
    try:
        return yaml.load(text, Loader=_Yaml)  # a SafeLoader, with two rules more
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InvalidInput(f"{where} is not a valid YAML file{line}: {problem}.") from None
    except (RecursionError, ValueError) as error:  # e.g. a date that no calendar has
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"{where} is not a valid YAML file: {reason}.") from None


def parse_json(text: str, where: str) -> Any:
    """Strict JSON: no key twice, and infinity only as the text "inf"."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, _ in pairs:
            if sum(key == other for other, _ in pairs) > 1:
                raise InvalidInput(f"{where}: {key} is given twice; keep one of the two.")
        return dict(pairs)

    def no_constant(name: str) -> NoReturn:
        raise InvalidInput(f'{where}: {name} is not JSON; write infinity as the text "inf".')

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{where} is not a valid JSON file at line {error.lineno}: {error.msg[0].lower()}{error.msg[1:]}."
        ) from None
    except (RecursionError, ValueError):
        raise InvalidInput(
            f"{where} is not a valid JSON file: it is nested too deeply or holds a number that is too long."
        ) from None


def json_text(value: Any) -> str:
    """The value as JSON; numbers that JSON lacks become the texts "inf", "-inf" and "nan"."""
    return json.dumps(_named(value), default=str)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_named(entry) for entry in value]
    return value


class _Yaml(yaml.SafeLoader):
    """Safe YAML that also refuses a key given twice, and reads numbers as they look, as YAML 1.2 and JSON do.

    PyYAML follows YAML 1.1, where 0100 is 64, 1:40 is 100, 1e-5 and -.5 are texts and a name `no` is a boolean. Here
    what is not plainly a number, or `true` or `false`, is a text, which a field that wants a number refuses.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        first: [
            (tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] not in ("int", "float", "bool")
        ]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _mapping_without_duplicates(loader: _Yaml, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} must be a text; put it in quotes", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key} is given twice; keep one of the two", key_node.start_mark
            )
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Yaml.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
for _name, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
