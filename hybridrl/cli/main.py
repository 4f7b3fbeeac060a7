"""The command line: ``hybridrl train FILE [key=value ...]``; ``sft``, ``check``, ``plan``, ``parity`` and ``launch`` likewise.

Commands that look at what runs have written are in ``look.py``.

The only place that reads arguments. Everything that can be refused is refused here, before an engine is imported.
Exit codes: 0 done, 1 the run failed, the engines disagree or the plan does not fit, 2 the configuration or the data is wrong, 75 stopped by
SIGUSR1 or SIGTERM, or a rank died or the run hung, and ready to go on by the same command, 130 interrupted.
"""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hybridrl.cli.doctor.command import add_doctor_command
from hybridrl.cli.export import add_export_command
from hybridrl.cli.launch import Launch, launch_of
from hybridrl.cli.launch import add_options as add_launch_options
from hybridrl.cli.look import add_look_commands
from hybridrl.cli.number import number
from hybridrl.config.schema import ExperimentConfig
from hybridrl.controller.stopping import EXIT_FAILED, EXIT_GO_ON, EXIT_INTERRUPTED
from hybridrl.errors import CheckpointError, ConfigError, DataError, HybridRLError, RankLostError
from hybridrl.observability.stacks import end_process
from hybridrl.observability.trackers.background import has_unfinished_trackers
from hybridrl.parity.options import ParityOptions
from hybridrl.preflight.check import Checked, load_checked
from hybridrl.preflight.command import Command

EXIT_OK, EXIT_WRONG_INPUT = 0, 2


class PlanFormat(enum.Enum):
    """How a prediction is printed."""

    TABLES = "tables"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked for.

    Attributes:
        command: What the configuration is for.
        parity: How to compare the engines, when that is asked instead of a run.
        plan: How to print a prediction, when that is asked instead of a run.
        launch: The Slurm job to submit, when that is asked instead of a run here.
    """

    path: Path
    overrides: tuple[str, ...]
    command: Command
    is_check_only: bool
    parity: ParityOptions | None = None
    plan: PlanFormat | None = None
    launch: Launch | None = None


Run = Callable[[ExperimentConfig], int]


def controller(command: Command) -> Run:
    """Return what carries a command out; imports the controller, and with it the engines, only now."""
    from hybridrl.controller.run import sft, train

    return sft if command is Command.SFT else train


def parity_check(options: ParityOptions) -> Run:
    """Return what compares the engines; imports the controller only now."""
    from hybridrl.controller.parity import parity

    return lambda config: parity(config, options)


def main(arguments: Sequence[str] | None = None, runner: Callable[[Command], Run] = controller) -> int:
    """Run a command.

    Args:
        arguments: Without the program's name; those of the process when None.
        runner: Finds what carries a command out.

    Returns:
        The exit code.
    """
    parsed = _parsed(arguments)
    return _look(parsed) if parsed.look is not None else _start(_request(parsed), runner)


def run() -> NoReturn:
    """Run the process's command and end the process, whatever trackers' clients that do not finish would do at its end."""
    code = main()
    if has_unfinished_trackers():
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(code)
    sys.exit(code)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings may stand before, between and after the options, which argparse alone does not allow."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(settings) < len(rest) or (settings and "overrides" not in parsed):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if settings:
        parsed.overrides += settings
    return parsed


def _start(request: Request, runner: Callable[[Command], Run]) -> int:
    try:
        return _carry_out(request, runner)
    except ConfigError as e:
        _complain(f"{request.path}: {len(e.problems)} problem(s) in the configuration; nothing was started", e)
        return EXIT_WRONG_INPUT
    except DataError as e:
        _complain(f"{request.path}: the data cannot be used", e)
        return EXIT_WRONG_INPUT
    except CheckpointError as e:
        _complain(f"{request.path}: the checkpoints cannot be used", e)
        return EXIT_WRONG_INPUT
    except HybridRLError as e:
        _complain(f"{request.path}: the run failed ({type(e).__name__})", e)
        return EXIT_GO_ON if isinstance(e, RankLostError) and e.can_go_on else EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _look(parsed: argparse.Namespace) -> int:
    try:
        code: int = parsed.look(parsed)
    except HybridRLError as e:
        _complain(f"{parsed.command}: cannot read this", e)
        return EXIT_WRONG_INPUT
    except OSError as e:
        _complain(
            f"{parsed.command}: a file or folder cannot be read or written; correct the path or its permissions", e
        )
        return EXIT_WRONG_INPUT
    return code


def _carry_out(request: Request, runner: Callable[[Command], Run]) -> int:
    if request.plan is not None:
        from hybridrl.cli.plan import predict

        return predict(request.path, request.overrides, as_json=request.plan is PlanFormat.JSON)
    checked = load_checked(request.path, request.overrides, request.command)
    if request.is_check_only:
        return _check(checked)
    if request.launch is not None:
        return request.launch.submit(request.path, request.overrides, checked.config)
    run = parity_check(request.parity) if request.parity is not None else runner(request.command)
    return run(checked.config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridrl", description="Reinforcement learning for mixture-of-experts models"
    )
    parser.set_defaults(look=None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("train", "train a policy with reinforcement learning"),
        ("sft", "fine-tune on demonstrations"),
        ("check", "check a configuration and its data, and print what follows from it"),
        ("plan", "predict memory, weight sync and step time of a configuration, before anything is started"),
        ("launch", "submit a run to a cluster, once its configuration is checked"),
        ("parity", "compare Megatron and vLLM with transformers, operator by operator"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("file", type=Path, metavar="FILE", help="YAML configuration")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
        )
        if name == "check":
            command.add_argument(
                "--sft", action="store_true", help="check it for hybridrl sft instead of hybridrl train"
            )
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        if name == "launch":
            add_launch_options(command)
        if name == "parity":
            _add_parity_options(command)
    add_look_commands(commands)
    add_doctor_command(commands)
    add_export_command(commands)
    return parser


def _request(parsed: argparse.Namespace) -> Request:
    is_check_only = parsed.command == "check"
    command_kind = Command.SFT if parsed.command == "sft" or (is_check_only and parsed.sft) else Command.TRAIN
    options = _parity_options(parsed) if parsed.command == "parity" else None
    plan = (PlanFormat.JSON if parsed.json else PlanFormat.TABLES) if parsed.command == "plan" else None
    launch = launch_of(parsed) if parsed.command == "launch" else None
    return Request(parsed.file, tuple(parsed.overrides), command_kind, is_check_only, options, plan, launch)


def _add_parity_options(command: argparse.ArgumentParser) -> None:
    default = ParityOptions()
    command.add_argument("--no-vllm", action="store_true", help="compare Megatron only")
    command.add_argument(
        "--num-tokens", type=number(int, 2), default=default.num_tokens, help="length of the sequence (%(default)s)"
    )
    command.add_argument(
        "--tolerance",
        type=number(float, 0),
        default=default.tolerance,
        help="bound on an operator's difference, relative to its largest value (%(default)s)",
    )
    command.add_argument(
        "--logprob-tolerance",
        type=number(float, 0),
        default=default.logprob_tolerance,
        help="bound on a log-prob's difference, in nats (%(default)s)",
    )


def _parity_options(parsed: argparse.Namespace) -> ParityOptions:
    return ParityOptions(parsed.num_tokens, parsed.tolerance, parsed.logprob_tolerance, not parsed.no_vllm)


def _check(checked: Checked) -> int:
    """Read the data and what there is to go on from as well, and print what follows from the configuration."""
    from hybridrl.controller.resuming import find_resumable
    from hybridrl.data.dataset import open_dataset
    from hybridrl.data.demonstrations import open_demonstrations
    from hybridrl.data.tokenizer import load_tokenizer

    config = checked.config
    tokenizer = load_tokenizer(Path(config.model.path))
    if checked.command is Command.SFT:
        open_demonstrations(config.data, tokenizer, config.sft.tool_fraction, config.seed)
    else:
        dataset = open_dataset(config.data, tokenizer, config.seed)
        dataset.train.take(1)
        find_resumable(config)
        for note in dataset.notes:
            print(note)
    print(checked.summary())
    return EXIT_OK


def _complain(headline: str, error: HybridRLError | OSError) -> None:
    print(f"hybridrl: {headline}", *(f"  {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    run()
