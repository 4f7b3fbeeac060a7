"""From a model spec and parallel degrees to Megatron-core's configuration and layer spec.

What differs between platforms is here: with Transformer Engine its layers and fusions are used, without it the local spec
with our layers.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from packaging.version import Version

from hybridrl.config.choices import Platform, Precision, Recompute
from hybridrl.config.schema import ParallelConfig
from hybridrl.engines.megatron.layers import CausalAttention, RmsNorm
from hybridrl.engines.megatron.model_fields import experts_of, model_fields
from hybridrl.engines.megatron.rotary import YarnTransformerConfig
from hybridrl.errors import EngineError
from hybridrl.layout.megatron import LayerSpec
from hybridrl.layout.model import MlaAttention, ModelSpec
from hybridrl.layout.rope import YarnScaling

TORCH_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
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
        EngineError: When the model needs what Megatron-core does not compute, its layers cannot share one configuration,
            or sequence parallelism is off where Megatron-core needs it.
    """
    fields = model_fields(spec)
    moe, yarn = experts_of(spec), isinstance(spec.rope.scaling, YarnScaling)
    is_sequence_parallel = parallel.sequence_parallel and parallel.tp_size > 1
    is_latent = isinstance(spec.layers[0].attention, MlaAttention)
    if (moe or is_latent) and parallel.tp_size > 1 and not is_sequence_parallel:
        what = "a mixture of experts" if moe else "latent attention"
        raise EngineError(
            f"sequence_parallel is off with tp_size {parallel.tp_size}, but {what} needs it; set sequence_parallel: true"
        )
    is_cuda, is_te = platform is Platform.CUDA, layer_spec is LayerSpec.TRANSFORMER_ENGINE
    if (
        is_latent
        and fields["q_lora_rank"] is None
        and not is_te
        and Version(megatron.core.__version__) >= Version("0.17")
    ):
        raise EngineError(
            f"{spec.family}: without Transformer Engine, megatron-core {megatron.core.__version__} cannot build latent "
            "attention whose query is not compressed; install Transformer Engine or megatron-core 0.16"
        )
    config_class = MLATransformerConfig if is_latent else YarnTransformerConfig if yarn else TransformerConfig
    return config_class(
        **fields,
        moe_grouped_gemm=is_te and moe is not None,
        moe_permute_fusion=is_te and moe is not None,
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
        # Fused kernels know neither YaRN's attention factor nor interleaved pairs.
        apply_rope_fusion=is_te and not (yarn or is_latent),
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _pipeline_fields(parallel: ParallelConfig) -> dict[str, Any]:
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
        _use_plain_query_projection(config, block)
        return block
    block.layer_norm = RmsNorm
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        _replace_norms(layer.submodules, "input_layernorm", "pre_mlp_layernorm")
        _replace_norms(attention, "q_layernorm", "k_layernorm", "kv_layernorm")
        if config.multi_latent_attention and config.q_lora_rank is None:
            attention.q_layernorm = IdentityOp
    return block


def _use_plain_query_projection(config: TransformerConfig, block: TransformerBlockSubmodules) -> None:
    """Have a latent query that is not compressed made from the layer's input as it is."""
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = PlainQueryAttention


class PlainQueryAttention(MLASelfAttention):
    """Latent attention whose query is not compressed.

    Where Megatron-core gives the compressed query a norm, 0.19.2 gives one to this query too, a second after the layer's own
    (``transformer/mla_qk_norm_config.py``). No checkpoint has it. 0.16 does not, and never calls this method.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        resolved = super()._resolve_qk_norm_config(submodules)
        return {**resolved, "linear_q_proj": submodules.linear_q_proj}


def _replace_norms(submodules: object, *names: str) -> None:
    for name in names:
        if getattr(submodules, name, None) not in (None, IdentityOp):
            setattr(submodules, name, RmsNorm)
