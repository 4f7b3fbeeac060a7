"""The choices that decide how vLLM names, cuts and spreads a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridrl.layout.box import DType
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.vllm.placement import ExpertPlacement

# Where a model's modules have other names than its checkpoint's tensors.
_RENAMES = {"gpt_oss": ((".self_attn.", ".attn."), ("model.embed_tokens.", "model.embedding."))}


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """How a replica lays a model out.

    Attributes:
        tp: Tensor-parallel degree of the replica.
        has_expert_parallel: Whether workers hold whole experts instead of a cut of each.
        pp: Pipeline-parallel degree.
        dp: Data-parallel degree inside the replica; experts are spread over tp * dp workers.
        placement: How experts are dealt to workers.
        physical_to_logical: Layer index -> the expert of each slot over all workers, where expert load balancing moved or
            copied experts; read from the workers, for it changes at run time.
        layer_partition: Layers per pipeline rank, None for vLLM's own choice.
        has_mla: Whether multi-head latent attention runs as such (VLLM_MLA_DISABLE is off).
        has_sequence_parallel_moe: Whether shared experts are whole on every worker.
    """

    spec: ModelSpec
    tp: int
    dtype: DType
    has_expert_parallel: bool = False
    pp: int = 1
    dp: int = 1
    placement: ExpertPlacement = ExpertPlacement.LINEAR
    physical_to_logical: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    layer_partition: tuple[int, ...] | None = None
    has_mla: bool = True
    has_sequence_parallel_moe: bool = False

    def local_name(self, tensor: str) -> str:
        """Return the module parameter that goes by a checkpoint-like name."""
        for canonical, local in _RENAMES.get(self.spec.family, ()):
            tensor = tensor.replace(canonical, local)
        return tensor
