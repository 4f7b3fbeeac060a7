"""Functions that users write in Python files of their own and name in the configuration.

:func:`find_function` checks a reference without running the file; :func:`load_function` runs it, in the process that needs
the function.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """Where a function is written."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def find_function(reference: FunctionReference, arguments: Sequence[str]) -> None:
    """Check that a file defines a function which can be called with `arguments`, given by position.

    Args:
        arguments: What the arguments are, for messages, e.g. ``response: str``.

    Raises:
        ConfigError: When the file is missing or is not Python, or has no such function.
    """
    path, name = reference.path, reference.name
    if not path.is_file():
        raise ConfigError(f"got {str(reference)!r}, but {path} is no file; correct the path")
    try:
        module = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"got {str(reference)!r}, but {path} is not Python ({e}); correct the file") from e
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        there = ", ".join(functions) or "none"
        raise ConfigError(
            f"got {str(reference)!r}, but {path} defines no function {name!r} (functions: {there}); correct the name"
        )
    _check_arguments(reference, functions[name].args, arguments)


def find_reference(reference: str, arguments: Sequence[str]) -> FunctionReference:
    """Return the function that ``file.py:function`` names, checked as by :func:`find_function`.

    Raises:
        ConfigError: When the text is not of that form, or there is no such function.
    """
    path_text, separator, name = reference.rpartition(":")
    path = Path(path_text)
    if not separator or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"got {reference!r}, expected file.py:function, for example rewards.py:score")
    found = FunctionReference(path, name)
    find_function(found, arguments)
    return found


def load_function(reference: FunctionReference) -> Callable[..., Any]:
    """Run the file and return its function.

    Raises:
        ImportError: When the file cannot be loaded; whatever the file raises passes through.
    """
    spec = importlib.util.spec_from_file_location(f"hybridrl_user_{reference.path.stem}", reference.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{reference.path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, reference.name)
    return function


def _check_arguments(reference: FunctionReference, found: ast.arguments, wanted: Sequence[str]) -> None:
    positional = [*found.posonlyargs, *found.args]
    num_required = len(positional) - len(found.defaults)
    has_room = len(positional) >= len(wanted) or found.vararg is not None
    has_required_keywords = any(default is None for default in found.kw_defaults)
    if num_required > len(wanted) or not has_room or has_required_keywords:
        names = ", ".join(argument.arg for argument in positional)
        raise ConfigError(f"got {str(reference)!r} with arguments ({names}), expected ({', '.join(wanted)})")
