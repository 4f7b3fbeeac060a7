"""The commands that look at what runs have written: ``hybridrl report RUN...``, ``rollouts RUN`` and ``replay FILE``.

They need no configuration, start nothing, and import neither ray nor an engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.cli.number import number
from hybridrl.config.step_list import StepList, parse_steps
from hybridrl.errors import ConfigError
from hybridrl.observability.comparison import write_comparison
from hybridrl.observability.rollout_browser import PageLimits, write_rollouts_page
from hybridrl.observability.run_folder import RunFolder, open_run
from hybridrl.observability.token_text import Decode

_LIMITS = PageLimits()

Look = Callable[[argparse.Namespace], int]


def add_look_commands(commands: Any) -> None:
    """Add the commands to the parser's; what carries a command out becomes its ``look``."""
    report = _command(commands, "report", "compare runs in one page that opens without a network", _report)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (comparison.html beside the first run)"
    )

    rollouts = _command(
        commands, "rollouts", "browse the samples of a run in one page that opens without a network", _rollouts
    )
    rollouts.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    rollouts.add_argument(
        "--steps", type=_steps, metavar="STEPS", help="steps to show, such as 0,10-12,/50 (all that fit)"
    )
    rollouts.add_argument(
        "--max-tokens", type=number(int, 1), default=_LIMITS.max_tokens, help="tokens of all samples (%(default)s)"
    )
    rollouts.add_argument(
        "--max-sample-tokens",
        type=number(int, 2),
        default=_LIMITS.max_sample_tokens,
        help="tokens of one sample (%(default)s)",
    )
    rollouts.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (rollouts.html in the run's folder)"
    )

    replay = _command(commands, "replay", "compute a recorded step again and report the first difference", _replay)
    replay.add_argument("file", type=Path, metavar="FILE", help="replays/step_*.parquet in the folder of a run")
    replay.add_argument(
        "--run-files",
        action="store_true",
        help="run the Python files and programs that the recorded configuration names",
    )


def _command(commands: Any, name: str, text: str, look: Look) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(look=look)
    return command


def _report(parsed: argparse.Namespace) -> int:
    runs = [open_run(path) for path in parsed.runs]
    output = parsed.output or runs[0].path.absolute().parent / "comparison.html"
    write_comparison(output, runs)
    print(output)
    return 0


def _rollouts(parsed: argparse.Namespace) -> int:
    run = open_run(parsed.run)
    output = parsed.output or run.path / "rollouts.html"
    limits = PageLimits(parsed.max_tokens, parsed.max_sample_tokens)
    decode = _decoder(run)
    if decode is None:
        print(f"{_model_folder(run)} has no tokenizer any more: tokens are shown as ids")
    wanted = (lambda number: True) if parsed.steps is None else parsed.steps.__contains__
    print(write_rollouts_page(output, run, decode, wanted, limits))
    print(output)
    return 0


def _replay(parsed: argparse.Namespace) -> int:
    from hybridrl.replay.recompute import replay
    from hybridrl.replay.report import replay_report
    from hybridrl.replay.step_file import read_step

    step = read_step(parsed.file)
    checks = replay(step, runs_user_files=parsed.run_files)
    print(replay_report(step, checks))
    return 1 if any(check.first for check in checks) else 0


def _decoder(run: RunFolder) -> Decode | None:
    """Return how the run's tokenizer decodes; None when its folder is gone."""
    from hybridrl.data.tokenizer import load_tokenizer

    folder = _model_folder(run)
    return load_tokenizer(folder).decode if (folder / "tokenizer.json").is_file() else None


def _model_folder(run: RunFolder) -> Path:
    return Path(str(run.config().get("model.path")))


def _steps(text: str) -> StepList:
    try:
        return parse_steps(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
