"""A whole model on one rank, and its logits: for comparisons with other implementations."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ParallelConfig
from hybridrl.engines.megatron.model import GPTModel, build_chunks, check_tensors, named_tensors
from hybridrl.engines.megatron.packing import packed_sequences
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.transformer_config import choose_layer_spec, transformer_config
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.shard import Place
from hybridrl.reshard.checkpoint import load_checkpoint


def load_whole_model(folder: Path, groups: ProcessGroups, platform: Platform = Platform.CPU) -> GPTModel:
    """Build a model in float32 and load an HF checkpoint into it.

    Args:
        groups: Of a world of one rank.

    Raises:
        EngineError: When Megatron-core does not compute the model.
        LayoutError: When the checkpoint does not fit it.
    """
    spec, parallel = read_model_spec(folder), ParallelConfig()
    layout = MegatronLayout(spec, parallel_sizes(parallel), DType.FLOAT32, choose_layer_spec(platform))
    config = transformer_config(spec, parallel, Precision.FLOAT32, platform, layout.layer_spec)
    chunks = build_chunks(layout, config, groups, seed=0)
    shard_map = megatron_shard_map(layout, Place("megatron", 0, "file", "rank 0"))
    check_tensors(shard_map, named_tensors(chunks))
    load_checkpoint(folder, spec, shard_map, named_tensors(chunks))
    return chunks[0].eval()


@torch.no_grad()
def logits_of(model: GPTModel, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after each token, [tokens, vocabulary] float32."""
    device = next(model.parameters()).device
    tokens = torch.tensor([token_ids], device=device)
    positions = torch.arange(len(token_ids), device=device).unsqueeze(0)
    packed = packed_sequences([len(token_ids)], 1, 0, device)
    logits: torch.Tensor = model(tokens, positions, None, packed_seq_params=packed)[0].float()
    return logits
