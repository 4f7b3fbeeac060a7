"""Functions written by users, named as ``file.py:function``: rewards and curricula.

:func:`find_user_function` checks a reference without running the file; :func:`load_function` runs it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError

_EXPECTED = "expected file.py:function"


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """Where a function is written."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def find_user_function(reference: str, signature: tuple[str, ...]) -> FunctionReference:
    """Find a function by reading its file.

    Args:
        signature: Its positional arguments, e.g. ``("response: str", "answer: str")``; their names are free.

    Raises:
        ConfigError: When the reference is not of the form file.py:function, the file is missing or is not Python, or
            does not define that function with that many positional arguments.
    """
    path_text, separator, name = reference.rpartition(":")
    path = Path(path_text)
    if not separator or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"got {reference!r}, {_EXPECTED}, for example rewards.py:score")
    if not path.is_file():
        raise ConfigError(f"got {reference!r}, {_EXPECTED}, but {path} is no file; correct the path")
    try:
        module = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"got {reference!r}, {_EXPECTED}, but {path} is not Python ({e}); correct the file") from e
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        there = ", ".join(functions) or "none"
        raise ConfigError(
            f"got {reference!r}, but {path} defines no function {name!r} (functions: {there}); correct the name"
        )
    _check_arguments(reference, functions[name].args, signature)
    return FunctionReference(path, name)


def _check_arguments(reference: str, arguments: ast.arguments, signature: tuple[str, ...]) -> None:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    has_room = len(positional) >= len(signature) or arguments.vararg is not None
    has_required_keywords = any(default is None for default in arguments.kw_defaults)
    if num_required > len(signature) or not has_room or has_required_keywords:
        names = ", ".join(argument.arg for argument in positional)
        raise ConfigError(f"got {reference!r} with arguments ({names}), expected ({', '.join(signature)})")


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
