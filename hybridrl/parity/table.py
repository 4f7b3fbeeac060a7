"""A parity report for people: one table of operators by layer, one of engines, and the findings in words."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridrl.parity.activations import Operator, Site
from hybridrl.parity.report import ParityReport

_CELL_WIDTH = len("1.0e-06")


def parity_table(report: ParityReport) -> RenderableType:
    """Lay out a report."""
    findings = [Text(line, style="green" if report.is_ok else "bold red") for line in report.findings()]
    outside = "; ".join(f"{x.site} {x.relative:.1e}" for x in report.operators if x.site.layer is None)
    return Group(
        "Megatron on one rank: difference from transformers, float32, relative to the largest value",
        _operators(report),
        outside,
        "\nAll engines: absolute difference from transformers, float32",
        _engines(report),
        *findings,
    )


def _operators(report: ParityReport) -> Table:
    found = {difference.site: difference.relative for difference in report.operators}
    layers = sorted({site.layer for site in found if site.layer is not None})
    operators = [operator for operator in Operator if any(Site(operator, layer) in found for layer in layers)]
    bound = report.options.tolerance
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("layer")
    for operator in operators:
        table.add_column(operator.value.replace(" ", "\n"), justify="right", overflow="fold", min_width=_CELL_WIDTH)
    for layer in layers:
        cells = [_cell(found.get(Site(operator, layer)), bound) for operator in operators]
        table.add_row(str(layer), *cells)
    return table


def _engines(report: ParityReport) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("engine", "logits", "log-probs"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for gap in report.gaps:
        logprobs = _cell(gap.logprobs, report.options.logprob_tolerance)
        table.add_row(gap.engine, "" if gap.logits is None else f"{gap.logits:.1e}", logprobs)
    return table


def _cell(value: float | None, bound: float) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.1e}", style="" if value <= bound else "bold red")
