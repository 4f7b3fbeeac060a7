"""The command ``hybridrl plan FILE [key=value ...]``: check everything, predict, print; 1 when it does not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hybridrl.config.load import read_draft
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import ConfigError
from hybridrl.planning.advice import shortfall
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.report import plan_json, plan_tables
from hybridrl.planning.run_plan import cluster_of, plan_run
from hybridrl.preflight.check import Checked, check_draft, load_planned
from hybridrl.preflight.command import Command

_WIDTH = 150


def predict(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print the prediction of a configuration.

    Returns:
        0 when it fits, 1 when it does not.

    Raises:
        ConfigError: Listing every problem of the configuration.
    """
    checked, cluster = _check(path, overrides)
    plan = plan_run(checked.config, checked.spec, cluster)

    def reload(settings: Sequence[str]) -> ExperimentConfig | None:
        replaced = {setting.partition("=")[0] for setting in settings}
        kept = [override for override in overrides if override.partition("=")[0] not in replaced]
        try:
            return load_planned(path, [*kept, *settings]).config
        except ConfigError:
            return None

    missing = shortfall(plan, checked.spec, reload)
    if as_json:
        print(json.dumps(plan_json(plan, checked.needs) | {"shortfall": str(missing) if missing else None}))
        return 1 if missing else 0
    console = Console(width=_WIDTH)
    console.print(*plan_tables(plan), sep="\n")
    console.print(f"verdict: {missing or plan.memory.verdict.value}", highlight=False, markup=False)
    if checked.needs:
        console.print(
            "to run it here:", *(f"  {need}" for need in checked.needs), sep="\n", highlight=False, markup=False
        )
    return 1 if missing else 0


def _check(path: Path, overrides: Sequence[str]) -> tuple[Checked, Cluster]:
    """Return the configuration and its cluster, or raise the problems of both together."""
    draft = read_draft(path, overrides)
    problems: list[str] = []
    checked = cluster = None
    try:
        checked = check_draft(draft, Command.TRAIN, is_plan=True)
    except ConfigError as e:
        problems += e.problems
    try:
        cluster = cluster_of(draft.config)
    except ConfigError as e:
        problems += e.problems
    if checked is None or cluster is None:
        raise ConfigError(problems)
    return checked, cluster
