"""From a model spec and parallel degrees to Megatron-core's configuration and layer spec.

What differs between platforms is here: with Transformer Engine its layers and fusions are used, without it the local spec
with our layers.
"""

from __future__ import annotations

import importlib.util
from typing import TypeVar

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.config.schema import ParallelConfig, Platform, Precision, Recompute
from hybridrl.engines.megatron.layers import CausalAttention, RmsNorm
from hybridrl.errors import EngineError
from hybridrl.layout.features import TRAINABLE_FEATURES, describe, features_of
from hybridrl.layout.megatron import LayerSpec
from hybridrl.layout.model import GatedMlp, GqaAttention, ModelSpec, MoeMlp

T = TypeVar("T")

TORCH_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


_RECOMPUTE: dict[Recompute, dict[str, object]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def choose_layer_spec(platform: Platform) -> LayerSpec:
    """Return Transformer Engine's layers where they can run, else the local ones."""
    has_te = platform is Platform.CUDA and importlib.util.find_spec("transformer_engine") is not None
    return LayerSpec.TRANSFORMER_ENGINE if has_te else LayerSpec.LOCAL


def transformer_config(
    spec: ModelSpec,
    parallel: ParallelConfig,
    precision: Precision,
    platform: Platform,
    layer_spec: LayerSpec,
    recompute: Recompute = Recompute.NONE,
) -> TransformerConfig:
    """Translate a model.

    Raises:
        EngineError: When the model needs what is not built yet, its layers cannot share one configuration, or sequence
            parallelism is off where Megatron-core needs it.
    """
    if missing := features_of(spec) - TRAINABLE_FEATURES:
        raise EngineError(
            f"{spec.family}: Megatron training does not support {describe(missing)} yet; train a model without"
        )
    attentions = [layer.attention for layer in spec.layers if isinstance(layer.attention, GqaAttention)]
    attention = _only(spec, {_attention_shape(attention) for attention in attentions}, "attention")
    moe = _only(spec, {_moe_shape(x.mlp) for x in spec.layers if isinstance(x.mlp, MoeMlp)}, "experts")
    dense = _only(spec, {x.mlp.intermediate_size for x in spec.layers if isinstance(x.mlp, GatedMlp)}, "MLP")
    assert attention is not None
    num_heads, num_kv_heads, head_dim, has_bias, has_norm = attention
    is_sequence_parallel = parallel.sequence_parallel and parallel.tp_size > 1
    if moe and parallel.tp_size > 1 and not is_sequence_parallel:
        raise EngineError(
            f"sequence_parallel is off with tp_size {parallel.tp_size}, but a mixture of experts needs it; set sequence_parallel: true"
        )
    is_cuda, is_te = platform is Platform.CUDA, layer_spec is LayerSpec.TRANSFORMER_ENGINE
    return TransformerConfig(
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_kv_heads,
        kv_channels=head_dim,
        ffn_hidden_size=dense or (moe[0] if moe else None),
        add_bias_linear=False,
        add_qkv_bias=has_bias,
        qk_layernorm=has_norm,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **_moe_fields(spec, moe, fuse=is_te),
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=parallel.etp_size,
        **_pipeline_fields(parallel),
        # The default refuses micro-batches of different sizes, even for dense models.
        moe_token_dispatcher_type="alltoall",
        **_RECOMPUTE[recompute],
        sequence_parallel=is_sequence_parallel,
        bf16=precision is Precision.BFLOAT16,
        params_dtype=TORCH_DTYPES[precision],
        pipeline_dtype=TORCH_DTYPES[precision],
        # The loss is a sum over the tokens of all ranks: gradients are added up, never averaged.
        calculate_per_token_loss=True,
        use_cpu_initialization=not is_cuda,
        deallocate_pipeline_outputs=True,
        persist_layer_norm=False,
        bias_activation_fusion=is_cuda,
        bias_dropout_fusion=is_cuda,
        apply_rope_fusion=is_te,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _pipeline_fields(parallel: ParallelConfig) -> dict[str, object]:
    if parallel.pp_size == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": parallel.vpp_size if parallel.vpp_size > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        # Packed micro-batches differ in their number of tokens.
        "variable_seq_lengths": True,
        # With two stages a rank's neighbours are the same rank; only these point-to-point calls tell directions apart.
        "overlap_p2p_comm": parallel.vpp_size > 1,
        "batch_p2p_comm": parallel.vpp_size == 1,
    }


def block_spec(
    config: TransformerConfig, layer_spec: LayerSpec, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of a pipeline stage."""
    is_te = layer_spec is LayerSpec.TRANSFORMER_ENGINE
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=is_te, normalization=config.normalization, vp_stage=vp_stage, pp_rank=pp_rank
    )
    if is_te:
        return block
    block.layer_norm = RmsNorm
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        _replace_norms(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        _replace_norms(attention, "q_layernorm", "k_layernorm")
    return block


def _replace_norms(submodules: object, *names: str) -> None:
    for name in names:
        if getattr(submodules, name) not in (None, IdentityOp):
            setattr(submodules, name, RmsNorm)


def _moe_fields(spec: ModelSpec, moe: tuple[int, int, int, bool] | None, *, fuse: bool) -> dict[str, object]:
    if moe is None:
        return {}
    intermediate, num_experts, top_k, is_normalized = moe
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": intermediate,
        "moe_layer_freq": [int(isinstance(layer.mlp, MoeMlp)) for layer in spec.layers],
        "moe_router_topk": top_k,
        # A softmax over the chosen logits equals the chosen probabilities rescaled to sum to one.
        "moe_router_pre_softmax": not is_normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": fuse,
        "moe_permute_fusion": fuse,
    }


def _attention_shape(attention: GqaAttention) -> tuple[int, int, int, bool, bool]:
    return (
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.has_qkv_bias,
        attention.has_qk_norm,
    )


def _moe_shape(moe: MoeMlp) -> tuple[int, int, int, bool]:
    return (moe.intermediate_size, moe.num_experts, moe.num_experts_per_token, moe.is_topk_normalized)


def _only(spec: ModelSpec, found: set[T], what: str) -> T | None:
    if len(found) > 1:
        raise EngineError(
            f"{spec.family}: layers differ in their {what} {sorted(map(str, found))}, expected the same in all"
        )
    return next(iter(found), None)
