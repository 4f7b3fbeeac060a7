"""The commands that look at what runs have written: ``hybridrl report RUN...``, ``rollouts RUN`` and ``replay FILE``.

They need no configuration, start nothing, and import neither ray nor an engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Look = Callable[[argparse.Namespace], int]


def add_look_commands(commands: Any) -> None:
    """Add the commands to the parser's; what carries a command out becomes its ``look``."""
    report = _command(commands, "report", "compare runs in one page that opens without a network", _report)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (comparison.html beside the first run)"
    )


def _command(commands: Any, name: str, text: str, look: Look) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(look=look)
    return command


def _report(parsed: argparse.Namespace) -> int:
    from hybridrl.observability.comparison import write_comparison
    from hybridrl.observability.run_folder import open_run

    runs = [open_run(path) for path in parsed.runs]
    output = parsed.output or runs[0].path.absolute().parent / "comparison.html"
    write_comparison(output, runs)
    print(output)
    return 0
