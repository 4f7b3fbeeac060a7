"""Family declarations and their refusals."""

import json
import math

import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.families import model_spec, read_model_spec
from hybridrl.layout.model import MoeMlp
from hybridrl.layout.rope import YarnScaling
from tests.unit.layout.models import FAMILIES, QWEN3_DENSE, QWEN3_MOE


def test_unsupported_family_lists_the_supported_ones():
    with pytest.raises(LayoutError, match=r"model_type 'gpt2' is not supported; supported are .*qwen3, qwen3_moe"):
        model_spec({"model_type": "gpt2"})


def test_missing_field_is_named():
    with pytest.raises(LayoutError, match=r"config.json: field 'num_experts' is missing"):
        model_spec({key: value for key, value in QWEN3_MOE.items() if key != "num_experts"})


def test_wrong_type_is_named():
    with pytest.raises(LayoutError, match=r"field 'hidden_size' is '32', expected an integer"):
        model_spec(QWEN3_DENSE | {"hidden_size": "32"})


def test_unsupported_rotary_embedding_is_refused():
    with pytest.raises(
        LayoutError, match=r"rope_type is 'longrope', but only \('default', 'linear', 'llama3', 'yarn'\)"
    ):
        model_spec(QWEN3_DENSE | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}})


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("plain", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rope_scaling_is_read_under_its_old_names(plain, name):
    assert model_spec(QWEN3_DENSE | plain | {"rope_scaling": None}).rope.scaling is None
    scaling = model_spec(QWEN3_DENSE | plain | {"rope_scaling": {name: "yarn", **YARN}}).rope.scaling
    assert isinstance(scaling, YarnScaling) and (scaling.factor, scaling.is_truncated) == (4.0, True)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize(
    ("scaling", "attention_factor"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)),
        ({"mscale_all_dim": 1.0}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_yarn_sharpens_attention_as_transformers_does(scaling, attention_factor):
    read = model_spec(QWEN3_DENSE | {"rope_scaling": {"rope_type": "yarn", **YARN, **scaling}}).rope.scaling
    assert isinstance(read, YarnScaling) and read.attention_factor == pytest.approx(attention_factor)


def test_a_rope_parameter_that_its_kind_does_not_know_is_refused():
    with pytest.raises(LayoutError, match=r"config.json: rope_scaling: mrope_section=\[1, 2\] not supported"):
        model_spec(QWEN3_DENSE | {"rope_scaling": {"rope_type": "yarn", **YARN, "mrope_section": [1, 2]}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_no_declaration_reads_is_refused(family):
    for field in ({"final_logit_softcapping": 30.0}, {"quantization_config": {"quant_method": "fp8"}}):
        with pytest.raises(LayoutError, match=rf"config.json: {next(iter(field))}=.* not supported"):
            model_spec(FAMILIES[family] | field)
    assert model_spec(FAMILIES[family] | {"final_logit_softcapping": None, "architectures": ["A"]})


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"num_key_value_heads": 2}),
        ("gpt_oss", {"swiglu_alpha": 1.0}),
    ],
)
def test_a_variant_that_is_not_declared_is_refused(family, field):
    with pytest.raises(LayoutError, match=rf"config.json: {next(iter(field))} is .* but only .* is supported"):
        model_spec(FAMILIES[family] | field)


def test_dense_layers_inside_a_mixture_are_declared():
    spec = model_spec(QWEN3_MOE | {"mlp_only_layers": [0]})
    assert [isinstance(layer.mlp, MoeMlp) for layer in spec.layers] == [False, True]
    spec = model_spec(QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert [isinstance(layer.mlp, MoeMlp) for layer in spec.layers] == [False, True, False, True]


def test_rope_theta_is_read_from_either_place():
    nested = {key: value for key, value in QWEN3_DENSE.items() if key != "rope_theta"}
    assert model_spec(nested | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}).rope.theta == 7.0
    assert model_spec(QWEN3_DENSE).rope.theta == 10000.0


def test_folder_without_config_is_named(tmp_path):
    with pytest.raises(LayoutError, match=r"config.json: no such file"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match=r"config.json: not valid JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
    assert read_model_spec(tmp_path).family == "qwen3_moe"
