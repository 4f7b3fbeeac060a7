"""A model spec becomes Megatron's configuration, or a reason why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ParallelConfig
from hybridrl.engines.megatron.transformer_config import choose_layer_spec, transformer_config
from hybridrl.errors import EngineError
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec
from hybridrl.layout.model import GatedMlp

HF = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
SPEC = model_spec(HF)


def config(spec=SPEC, **parallel):
    return transformer_config(spec, ParallelConfig(**parallel), Precision.FLOAT32, Platform.CPU, LayerSpec.LOCAL)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_normalized_top_k_is_a_softmax_after_the_choice(is_normalized):
    assert config(model_spec({**HF, "norm_topk_prob": is_normalized})).moe_router_pre_softmax is not is_normalized


def test_dense_layers_among_experts_keep_their_own_size():
    dense = replace(SPEC.layers[0], mlp=GatedMlp(SPEC.layers[0].mlp.prefix, 32, 96))
    mixed = config(replace(SPEC, layers=(dense, *SPEC.layers[1:])))
    assert mixed.moe_layer_freq == [0, 1, 1] and (mixed.ffn_hidden_size, mixed.moe_ffn_hidden_size) == (96, 16)


def test_experts_with_tensor_parallel_need_sequence_parallel():
    with pytest.raises(EngineError, match=r"sequence_parallel is off with tp_size 2.*set sequence_parallel: true"):
        config(tp_size=2, sequence_parallel=False)


def test_what_megatron_does_not_compute_is_refused_in_words():
    gated = replace(SPEC.layers[0], attention=replace(SPEC.layers[0].attention, has_output_gate=True))
    expected = "qwen3_moe: Megatron training does not support an attention output gate; train a model without"
    with pytest.raises(EngineError, match=expected):
        config(replace(SPEC, layers=(gated, *SPEC.layers[1:])))


def test_layers_of_different_attention_are_refused():
    other = replace(SPEC.layers[1], attention=replace(SPEC.layers[1].attention, num_kv_heads=1))
    with pytest.raises(EngineError, match=r"qwen3_moe: layers differ in their attention .* expected the same in all"):
        config(replace(SPEC, layers=(SPEC.layers[0], other, SPEC.layers[2])))


def test_cpu_uses_the_local_layers():
    assert choose_layer_spec(Platform.CPU) is LayerSpec.LOCAL
