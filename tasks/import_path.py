"""Data loaders and network factories are named by import path, so that users can bring their own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from accounting.errors import InvalidInput, RemergeError

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
        if f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"The {what} {path} cannot be imported (no module named {error.name}): correct the path, or let this "
                "environment find the package by `pip install -e` of its folder, or by setting PYTHONPATH before "
                "`remerge up`."
            ) from None
        raise InvalidInput(
            f"The {what} {path} cannot be imported, for it needs a package that is missing here (no module named "
            f"{error.name}); install that into this environment."
        ) from None
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"The {what} {path} cannot be imported: {_first_line(error)}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise InvalidInput(f"The {what} {path} does not exist: module {module_name} has no function {name}.")
    function: Callable[..., Any] = found
    return function


def call(path: str, what: str, /, **arguments: Any) -> Any:
    """Call the function that `path` names.

    Raises:
        InvalidInput: it does not exist, does not take these arguments, or fails.
    """
    function = resolve(path, what)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InvalidInput(f"The {what} {path} does not accept its arguments: {error}.") from None
    except ValueError:
        pass  # some built-in functions do not say what they take
    try:
        return function(**arguments)
    except RemergeError:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"The {what} {path} failed with {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ") + "."
