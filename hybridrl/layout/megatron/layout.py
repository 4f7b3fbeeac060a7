"""The choices that decide how Megatron-core names, cuts and spreads a model."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hybridrl.layout.box import DType
from hybridrl.layout.megatron.pipeline import ModelChunk, PipelineLayout
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import ParallelSizes


class LayerSpec(enum.Enum):
    """Which Megatron-core layer spec built the model; decides parameter names."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class ExpertContainer(enum.Enum):
    """How a rank holds its experts."""

    SEQUENTIAL = "sequential"  # SequentialMLP: one MLP per expert
    TE_GROUPED = "te_grouped"  # TEGroupedMLP: one parameter per expert, weight0, weight1, ...
    SINGLE_GROUPED = "single_grouped"  # TEGroupedMLP with moe_single_grouped_weight: one parameter for all


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """How a model is laid out over Megatron ranks.

    Attributes:
        dtype: Of parameters; buffers and parameters that stay float32 say so themselves.
        vocab_divisor: The padded vocabulary is a multiple of this times tp.
        experts: None for the container that `layer_spec` uses by default.
        router_dtype: Of the router weight and bias, None for `dtype`.
        glu_interleave_size: Gate and up rows of experts alternate in blocks of so many (moe_mlp_glu_interleave_size).
        is_mla_down_fused: Whether q_a_proj and kv_a_proj are one ``linear_qkv_down_proj`` (mla_down_proj_fusion).
        mtp_inner_name: Module of a multi-token-prediction layer's inner layer: ``transformer_layer`` in megatron-core 0.16,
            ``mtp_model_layer`` in 0.19.
    """

    spec: ModelSpec
    sizes: ParallelSizes
    dtype: DType
    layer_spec: LayerSpec = LayerSpec.LOCAL
    vocab_divisor: int = 1
    pipeline: PipelineLayout = field(default_factory=PipelineLayout)
    experts: ExpertContainer | None = None
    router_dtype: DType | None = None
    glu_interleave_size: int | None = None
    is_mla_down_fused: bool = False
    mtp_inner_name: str = "transformer_layer"

    @property
    def is_te(self) -> bool:
        """Whether Transformer Engine's layers are used."""
        return self.layer_spec is LayerSpec.TRANSFORMER_ENGINE

    @property
    def expert_container(self) -> ExpertContainer:
        """How a rank holds its experts."""
        return self.experts or (ExpertContainer.TE_GROUPED if self.is_te else ExpertContainer.SEQUENTIAL)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.vocab_divisor * self.sizes.tp
        return -(-self.spec.vocab_size // multiple) * multiple

    def chunks(self, pp_rank: int) -> tuple[ModelChunk, ...]:
        """Return the model chunks of a pipeline rank.

        Raises:
            LayoutError: When the layers do not divide.
        """
        return self.pipeline.chunks(pp_rank, self.sizes.pp, len(self.spec.layers), len(self.spec.mtp_layers))
