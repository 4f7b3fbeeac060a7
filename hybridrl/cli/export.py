"""``hybridrl export RUN|CHECKPOINT OUT``: weights as a Hugging Face checkpoint. Needs no configuration and starts nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridrl.layout.roles import ModelRole


def add_export_command(commands: Any) -> None:
    """Add the command to the parser's."""
    text = "write the weights of a run or a checkpoint as a Hugging Face checkpoint"
    command: argparse.ArgumentParser = commands.add_parser("export", help=text, description=text)
    command.add_argument(
        "source",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="folder of a run, for its newest checkpoint, or of a checkpoint",
    )
    command.add_argument("output", type=Path, metavar="OUT", help="folder to write, which must not exist yet")
    command.set_defaults(look=_export)


def _export(parsed: argparse.Namespace) -> int:
    from hybridrl.checkpoint.export import export

    taken = export(parsed.source, parsed.output, ModelRole.ACTOR.value, print)
    print(f"{parsed.output}: the weights after step {taken.manifest.step}, from {taken.folder}")
    return 0
