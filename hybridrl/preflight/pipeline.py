"""Can the model's layers be spread over the pipeline as configured?"""

from __future__ import annotations

from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import LayoutError
from hybridrl.layout.megatron.pipeline import parse_stages, pipeline_layout
from hybridrl.layout.model import ModelSpec
from hybridrl.preflight.report import Report, divisors

_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def check_pipeline(report: Report, section: str, parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Check pipeline stages and model chunks against the number of layers.

    Args:
        section: Of the degrees, e.g. ``actor.parallel``.
    """
    uneven = [name for name in _UNEVEN if getattr(parallel, name) is not None]
    named = [*uneven, *(["pipeline_layout"] if parallel.pipeline_layout is not None else [])]
    if parallel.pp_size == 1:
        for name in [*named, *(["vpp_size"] if parallel.vpp_size > 1 else [])]:
            key = f"{section}.{name}"
            report.add(key, getattr(parallel, name), "nothing, since pp_size is 1", "remove it or raise pp_size")
    elif parallel.pipeline_layout is not None:
        _check_stages(report, section, parallel, spec, uneven)
    elif uneven:
        _check_layout(report, parallel, spec, f"{section}.{uneven[0]}")
    else:
        _check_even(report, section, parallel, len(spec.layers))


def _check_stages(report: Report, section: str, parallel: ParallelConfig, spec: ModelSpec, uneven: list[str]) -> None:
    key, text = f"{section}.pipeline_layout", parallel.pipeline_layout
    assert text is not None
    for name in uneven:
        report.add(f"{section}.{name}", getattr(parallel, name), "null beside pipeline_layout", "remove one of them")
    try:
        num_stages = len(parse_stages(text))
    except LayoutError as e:
        report.add(key, text, "stages of E, t and L", str(e))
        return
    expected = parallel.pp_size * parallel.vpp_size
    if num_stages != expected:
        got = f"{num_stages} stages"
        sizes = f"pp_size {parallel.pp_size} x vpp_size {parallel.vpp_size} = {expected}"
        report.add(key, got, sizes, "list as many", related=(f"{section}.pp_size", f"{section}.vpp_size"))
    else:
        _check_layout(report, parallel, spec, key)


def _check_layout(report: Report, parallel: ParallelConfig, spec: ModelSpec, key: str) -> None:
    try:
        pipeline_layout(parallel).chunks(0, parallel.pp_size, len(spec.layers), len(spec.mtp_layers))
    except LayoutError as e:
        got = getattr(parallel, key.rsplit(".", 1)[1])
        report.add(key, got, f"stages that hold the model's {len(spec.layers)} layers", str(e))


def _check_even(report: Report, section: str, parallel: ParallelConfig, num_layers: int) -> None:
    if num_layers % parallel.pp_size:
        expected = f"a divisor of the model's {num_layers} layers"
        next_step = f"choose one of {divisors(num_layers)}, or list the stages in pipeline_layout"
        report.add(f"{section}.pp_size", parallel.pp_size, expected, next_step)
    elif (per_rank := num_layers // parallel.pp_size) % parallel.vpp_size:
        expected = f"a divisor of the {per_rank} layers of a pipeline rank"
        next_step = f"choose one of {divisors(per_rank)}"
        report.add(f"{section}.vpp_size", parallel.vpp_size, expected, next_step, related=(f"{section}.pp_size",))
