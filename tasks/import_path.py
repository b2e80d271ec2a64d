"""Data loaders and network factories are named by import path, so that users can bring their own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from accounting.errors import InvalidInput

_PATH = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def resolve(path: str, what: str) -> Callable[..., Any]:
    """Import the function that `path` names, as "module:function".

    Args:
        path: for example "tasks.models:softmax_regression"; the module must be importable here.
        what: what is being resolved, for the error ("data loader", "network factory").

    Raises:
        InvalidInput: with what to correct.
    """
    if not _PATH.match(path):
        raise InvalidInput(
            f'The {what} {path!r} must be an import path such as "my_package.my_module:my_function".'
        )
    module_name, name = path.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"The {what} {path} cannot be imported (no module named {error.name}); install the package that "
            "holds it on this machine, or correct the path."
        ) from None
    found = getattr(module, name, None)
    if not callable(found):
        raise InvalidInput(f"The {what} {path} does not exist: module {module_name} has no function {name}.")
    return found


def call(path: str, what: str, **arguments: Any) -> Any:
    """Call the function that `path` names.

    Raises:
        InvalidInput: it does not exist or does not take these arguments.
    """
    function = resolve(path, what)
    try:
        return function(**arguments)
    except TypeError as error:
        raise InvalidInput(f"The {what} {path} does not accept its arguments: {error}.") from error
