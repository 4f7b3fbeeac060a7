"""Which layers each pipeline stage has: even, uneven, interleaved, or listed one by one.

Stages are numbered in the order in which a token passes them; with p pipeline ranks, chunk c of rank r is stage c * p + r.

Worked example: 8 layers, 2 ranks, 2 chunks each. The four stages have layers 0-1, 2-3, 4-5 and 6-7, so rank 0 holds chunks
with layers 0-1 and 4-5, rank 1 those with layers 2-3 and 6-7.

Source: megatron-core 0.16.1 and 0.19.2, ``transformer/transformer_block.py`` (get_num_layers_to_build),
``transformer/transformer_layer.py`` (get_transformer_layer_offset), ``transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import LayoutError

_EMBEDDING, _LAYER, _MTP, _OUTPUT = "E", "t", "m", "L"


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """What one pipeline stage holds; `layers` are global indices."""

    layers: range
    has_embedding: bool
    has_mtp: bool
    has_output: bool


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """How layers are spread over pipeline stages; the fields are named as in Megatron-core.

    Attributes:
        virtual_size: Model chunks per rank.
        num_layers_in_first_pipeline_stage: Layers of rank 0, over all its chunks.
        num_layers_in_last_pipeline_stage: Layers of the last rank, over all its chunks.
        account_for_embedding_in_pipeline_split: Count the embedding as a layer.
        account_for_loss_in_pipeline_split: Count the loss as a layer.
        stages: Explicit stages: E (embedding), t (layer), m (multi-token prediction) and L (loss), separated by ``|``, with
            ``x*3`` and ``(tt|)*3`` for repetition. Example: ``Et*3|(tt|)*2mL``.
    """

    virtual_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    stages: str | None = None

    def chunks(self, pp_rank: int, pp_size: int, num_layers: int, num_mtp: int) -> tuple[ModelChunk, ...]:
        """Return the model chunks of a rank.

        Raises:
            LayoutError: When the layers do not divide, or listed stages do not fit the model.
        """
        stages = self._stages(pp_size, num_layers, num_mtp)
        chunks = []
        first_layer = 0
        for stage in stages:
            last_layer = first_layer + stage.count(_LAYER)
            layers = range(first_layer, last_layer)
            chunks.append(ModelChunk(layers, _EMBEDDING in stage, _MTP in stage, _OUTPUT in stage))
            first_layer = last_layer
        return tuple(chunks[pp_rank::pp_size])

    def _stages(self, pp_size: int, num_layers: int, num_mtp: int) -> list[str]:
        if self.stages is not None:
            stages = parse_stages(self.stages)
            _check_stages(self.stages, stages, pp_size, num_layers, num_mtp)
            return stages
        counts = self._layer_counts(pp_size, num_layers)
        stages = [_LAYER * count for count in counts]
        stages[0] = _EMBEDDING + stages[0]
        stages[-1] += _MTP * num_mtp + _OUTPUT
        return stages

    def _layer_counts(self, pp_size: int, num_layers: int) -> list[int]:
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        extra = self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
        if extra and (first is not None or last is not None):
            raise LayoutError(
                "num_layers_in_first/last_pipeline_stage cannot be combined with account_for_embedding/loss_in_pipeline_"
                "split; list the stages instead"
            )
        per_rank = self._layers_per_rank(pp_size, num_layers + extra, first, last)
        for rank, count in enumerate(per_rank):
            if count % self.virtual_size:
                raise LayoutError(
                    f"{count} layers of pipeline rank {rank} do not divide into virtual_size {self.virtual_size} chunks"
                )
        counts = [per_rank[rank] // self.virtual_size for _ in range(self.virtual_size) for rank in range(pp_size)]
        counts[0] -= self.account_for_embedding_in_pipeline_split
        counts[-1] -= self.account_for_loss_in_pipeline_split
        return counts

    @staticmethod
    def _layers_per_rank(pp_size: int, num_layers: int, first: int | None, last: int | None) -> list[int]:
        middle_ranks = pp_size - (first is not None) - (last is not None)
        middle = num_layers - (first or 0) - (last or 0)
        if (middle_ranks <= 0 and middle) or middle < 0:
            raise LayoutError(
                f"num_layers_in_first/last_pipeline_stage {first}, {last} leave {middle} of {num_layers} layers for "
                f"{max(middle_ranks, 0)} pipeline ranks"
            )
        if middle_ranks > 0 and middle % middle_ranks:
            raise LayoutError(f"{middle} layers do not divide into pp_size {middle_ranks} equal stages")
        counts = [middle // middle_ranks if middle_ranks else 0] * middle_ranks
        return [*([first] if first is not None else []), *counts, *([last] if last is not None else [])]


def pipeline_layout(config: ParallelConfig) -> PipelineLayout:
    """Return the configured pipeline in the layout language."""
    return PipelineLayout(
        virtual_size=config.vpp_size,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        stages=config.pipeline_layout,
    )


def parse_stages(text: str) -> list[str]:
    """Expand a list of stages. Example: ``Et|(tt|)*2mL`` -> ["Et", "tt", "tt", "mL"].

    Raises:
        LayoutError: For a letter other than E, t, m and L.
    """
    plain = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), plain)
    unknown = sorted(set(plain) - {_EMBEDDING, _LAYER, _MTP, _OUTPUT, "|"})
    if unknown:
        raise LayoutError(f"pipeline stages {text!r}: got {' '.join(unknown)}, expected E, t, m, L, | and repetitions")
    return plain.split("|")


def _check_stages(text: str, stages: list[str], pp_size: int, num_layers: int, num_mtp: int) -> None:
    order = "".join(stages)
    expected = _EMBEDDING + _LAYER * num_layers + _MTP * num_mtp + _OUTPUT
    problems = []
    if len(stages) % pp_size:
        problems.append(f"{len(stages)} stages do not divide by pp_size {pp_size}")
    if order != expected:
        counts = f"{order.count(_LAYER)} layers and {order.count(_MTP)} multi-token-prediction layers"
        problems.append(f"got {counts}, expected E, {num_layers} t, {num_mtp} m and L in this order")
    if num_mtp and not any(stage.count(_MTP) == num_mtp for stage in stages):
        problems.append("multi-token-prediction layers must share one stage")
    if problems:
        raise LayoutError(f"pipeline stages {text!r}: {'; '.join(problems)}")
