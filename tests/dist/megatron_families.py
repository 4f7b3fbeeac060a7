"""Builds megatron-core's own modules for models that the engine does not train yet, and names their tensors.

On a CPU only the local layer spec can be built; parallel sizes above one need the process groups of `run_ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ParallelConfig
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.layers import RmsNorm
from hybridrl.engines.megatron.model import named_tensors
from hybridrl.engines.megatron.process_groups import ProcessGroups, start_process_group, stop_process_group
from hybridrl.layout.attention import GqaAttention, MlaAttention
from hybridrl.layout.families import model_spec
from hybridrl.layout.mlp import GatedMlp, MoeMlp, RouterScoring
from hybridrl.layout.model import ModelSpec


def real_tensors(
    rank: int, init_method: str, model: Mapping[str, object], parallel: ParallelConfig, has_mtp: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every parameter and persistent buffer of a rank's real model, by local name."""
    cpu.install()
    groups = start_process_group(rank, parallel, Platform.CPU, init_method, timeout_s=60)
    # True in 0.16.1 without Transformer Engine too, whose classes are then asked about with isinstance.
    multi_latent_attention.HAVE_TE = False
    chunk = _build(model_spec(model, has_mtp=has_mtp), parallel, groups)
    stop_process_group()
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors([chunk]).items()}


class NoAttention(torch.nn.Module):
    """Stands for Transformer Engine's attention, without which MLA cannot be built; it has no parameters."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def _build(spec: ModelSpec, parallel: ParallelConfig, groups: ProcessGroups) -> GPTModel:
    at = groups.at
    tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=at.tp, ep_rank=at.ep, etp_rank=at.etp)
    config = _config(spec, parallel)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=at.pp)
    block.layer_norm = RmsNorm
    for layer in block.layer_specs:
        _use_rms_norm(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        attention = layer.submodules.self_attention.submodules
        _use_rms_norm(attention, "q_layernorm", "k_layernorm", "kv_layernorm")
        if config.multi_latent_attention:
            attention.core_attention = NoAttention
            if config.q_lora_rank is None:
                attention.q_layernorm = IdentityOp
    mtp = None
    if spec.mtp_layers and groups.is_last_stage:
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, pp_rank=at.pp)
        for layer in mtp.layer_specs:
            _use_rms_norm(layer.submodules, "enorm", "hnorm", "layer_norm")
    with cpu.cuda_tensor_methods():
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            mtp_block_spec=mtp,
            vocab_size=-(-spec.vocab_size // parallel.tp_size) * parallel.tp_size,
            max_sequence_length=spec.max_positions,
            pre_process=groups.at.pp == 0,
            post_process=groups.is_last_stage,
            share_embeddings_and_output_weights=spec.is_tied,
            position_embedding_type="rope",
            pg_collection=groups.collection,
        )


def _use_rms_norm(submodules: object, *names: str) -> None:
    for name in names:
        if getattr(submodules, name, None) not in (None, IdentityOp):
            setattr(submodules, name, RmsNorm)


def _config(spec: ModelSpec, parallel: ParallelConfig) -> TransformerConfig:
    attention = spec.layers[0].attention
    dense = next((x.mlp for x in spec.layers if isinstance(x.mlp, GatedMlp)), None)
    moe = next(x.mlp for x in spec.layers if isinstance(x.mlp, MoeMlp))
    fields: dict[str, Any] = {
        "num_layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "num_attention_heads": attention.num_heads,
        "ffn_hidden_size": dense.intermediate_size if dense else moe.intermediate_size,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": parallel.tp_size,
        "pipeline_model_parallel_size": parallel.pp_size,
        "pipeline_dtype": torch.bfloat16,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.etp_size,
        "sequence_parallel": parallel.tp_size > 1,
        "mtp_num_layers": len(spec.mtp_layers) or None,
    }
    fields |= _expert_fields(spec, moe)
    if isinstance(attention, MlaAttention):
        return MLATransformerConfig(**fields, **_mla_fields(attention), add_bias_linear=False)
    return TransformerConfig(**fields, **_gqa_fields(attention))


def _expert_fields(spec: ModelSpec, moe: MoeMlp) -> dict[str, Any]:
    is_sigmoid = moe.scoring is RouterScoring.SIGMOID
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_layer_freq": [int(isinstance(layer.mlp, MoeMlp)) for layer in spec.layers],
        "moe_router_topk": moe.num_experts_per_token,
        "moe_router_score_function": "sigmoid" if is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": moe.correction_bias is not None,
        "moe_shared_expert_intermediate_size": moe.shared.intermediate_size if moe.shared else None,
        "moe_shared_expert_gate": moe.shared_gate is not None,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def _mla_fields(attention: MlaAttention) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_nope_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
    }


def _gqa_fields(attention: GqaAttention) -> dict[str, Any]:
    return {
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.has_qk_norm,
        "add_qkv_bias": attention.has_qkv_bias,
        "add_bias_linear": attention.has_output_bias,
        "softmax_type": "learnable" if attention.has_sinks else "vanilla",
    }
