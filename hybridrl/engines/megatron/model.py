"""Builds the model chunks of one rank and names their tensors.

A rank holds a list of chunks (one without virtual pipeline stages). Tensors are named ``{chunk}.{parameter}``, as in
``layout/megatron.py``, and every name and shape is checked against the declared map.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.engines.megatron.cpu import cuda_tensor_methods
from hybridrl.engines.megatron.local_gradients import correct_gradients
from hybridrl.engines.megatron.model_fields import latent_norm_epsilon
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.rotary import YarnTransformerConfig, set_rotary_embeddings
from hybridrl.engines.megatron.transformer_config import block_spec
from hybridrl.engines.megatron.value_output import ValueOutput
from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.megatron.pipeline import ModelChunk
from hybridrl.layout.shard import ShardMap

# Modules of their own, or fused into the projection that follows (Transformer Engine).
_LATENT_NORMS = (".q_layernorm", ".kv_layernorm", ".linear_q_up_proj", ".linear_kv_up_proj")
_DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}


def build_chunks(layout: MegatronLayout, config: TransformerConfig, groups: ProcessGroups, seed: int) -> list[GPTModel]:
    """Build this rank's part of the model, initialised from `seed`."""
    torch.manual_seed(seed)
    at = groups.at
    tensor_parallel.model_parallel_cuda_manual_seed(seed, tp_rank=at.tp, ep_rank=at.ep, etp_rank=at.etp)
    chunks = layout.chunks(at.pp)
    return [
        _build_chunk(layout, config, groups, seed, index if len(chunks) > 1 else None, chunk)
        for index, chunk in enumerate(chunks)
    ]


def _build_chunk(
    layout: MegatronLayout,
    config: TransformerConfig,
    groups: ProcessGroups,
    seed: int,
    vp_stage: int | None,
    chunk: ModelChunk,
) -> GPTModel:
    spec = layout.spec
    with cuda_tensor_methods():
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layout.layer_spec, groups.at.pp, vp_stage),
            vocab_size=layout.padded_vocab_size,
            max_sequence_length=spec.max_positions,
            pre_process=chunk.has_embedding,
            post_process=chunk.has_output,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.is_tied and spec.value_head is None,
            position_embedding_type="yarn" if isinstance(config, YarnTransformerConfig) else "rope",
            rotary_base=spec.rope.theta,
            rotary_percent=spec.rope.fraction,
            pg_collection=groups.collection,
            vp_stage=vp_stage,
        )
    if spec.value_head and chunk.has_output:
        model.output_layer = ValueOutput(spec.value_head, config, seed, groups.collection.tp)
    set_rotary_embeddings(model, spec)
    _set_latent_norm_epsilon(model, latent_norm_epsilon(spec))
    _mark_experts(model)
    correct_gradients(model)
    return model.to(groups.device)


def _mark_experts(model: GPTModel) -> None:
    """Have the gradients of experts summed over the ranks that hold the same experts.

    Megatron-core does so with ep above 1 only; else it takes the data-parallel ranks for them, which is wrong when etp
    differs from tp.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def _set_latent_norm_epsilon(chunk: GPTModel, epsilon: float | None) -> None:
    """Set what the configuration has no field for: the epsilon of the norms inside latent attention."""
    if epsilon is None:
        return
    for name, module in chunk.named_modules():
        if name.endswith(_LATENT_NORMS) and hasattr(module, "eps"):
            module.eps = epsilon


def named_tensors(chunks: list[GPTModel]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by local name, as views of the live data."""
    tensors: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(chunks):
        tensors |= {f"{index}.{name}": parameter.data for name, parameter in chunk.named_parameters()}
        persistent = chunk.state_dict(keep_vars=True)
        tensors |= {f"{index}.{name}": buffer for name, buffer in chunk.named_buffers() if name in persistent}
    return tensors


def check_tensors(shard_map: ShardMap, tensors: dict[str, torch.Tensor]) -> None:
    """Compare a declared map with the real modules.

    Raises:
        LayoutError: Listing each tensor that is missing, undeclared, of another shape or element type, or not contiguous.
    """
    problems = [f"{name}: declared but not in the model" for name in shard_map.tensors if name not in tensors]
    for name, tensor in tensors.items():
        declared = shard_map.tensors.get(name)
        if declared is None:
            problems.append(f"{name}: in the model {tuple(tensor.shape)} but not declared")
        elif declared.shape != tuple(tensor.shape):
            problems.append(f"{name}: got shape {tuple(tensor.shape)}, expected {declared.shape}")
        elif _DTYPES.get(tensor.dtype) is not declared.dtype:
            problems.append(f"{name}: got {tensor.dtype}, expected {declared.dtype.value}")
        elif not tensor.is_contiguous():
            problems.append(f"{name}: strides {tensor.stride()}, expected a contiguous tensor")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise LayoutError(f"{shard_map.place}: the model differs from its declared layout: {shown}")
