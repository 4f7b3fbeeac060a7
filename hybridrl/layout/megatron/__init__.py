"""Where a Megatron-core rank keeps the weights of a model.

The map is declared from the model and the rank's coordinates alone, so it needs no process; the engine checks it against
the names and shapes of its real modules at start. One file per noun: ``layout`` (the choices), ``pipeline`` (which layers a
rank has), ``rank`` (the whole map), ``attention``, ``mlp`` and ``experts`` (its parts), ``slices`` (how a tensor is cut).
"""

from __future__ import annotations

from hybridrl.layout.megatron.layout import ExpertContainer, LayerSpec, MegatronLayout
from hybridrl.layout.megatron.pipeline import ModelChunk, PipelineLayout
from hybridrl.layout.megatron.rank import megatron_shard_map

__all__ = ["ExpertContainer", "LayerSpec", "MegatronLayout", "ModelChunk", "PipelineLayout", "megatron_shard_map"]
