"""What each family needs of an engine."""

import pytest

from hybridrl.layout.families import model_spec
from hybridrl.layout.features import Feature, describe, features_of, training_obstacles
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
NEEDS = {
    "qwen2": {Feature.QKV_BIAS},
    "llama": set(),
    "llama-biased": {Feature.QKV_BIAS, Feature.OUTPUT_BIAS},
    "qwen3": {Feature.QK_NORM},
    "qwen3_moe": {Feature.QK_NORM, Feature.EXPERTS},
    "qwen2_moe": {Feature.QKV_BIAS, Feature.EXPERTS, Feature.SHARED_EXPERTS, Feature.SHARED_EXPERT_GATE},
    "mixtral": {Feature.EXPERTS},
    "deepseek_v2": {Feature.MLA, Feature.EXPERTS, Feature.SHARED_EXPERTS},
    "gpt_oss": {
        Feature.QKV_BIAS,
        Feature.OUTPUT_BIAS,
        Feature.SINKS,
        Feature.SLIDING_WINDOW,
        Feature.EXPERTS,
        Feature.ROUTER_BIAS,
        Feature.EXPERT_BIAS,
        Feature.CLAMPED_SWIGLU,
        Feature.ROPE_SCALING,
    },
}


@pytest.mark.parametrize("family", NEEDS)
def test_a_family_needs_what_it_is_made_of(family):
    assert features_of(model_spec(FAMILIES[family])) == NEEDS[family]


def test_prediction_layers_and_scaled_rotary_embeddings_are_features():
    assert Feature.MTP in features_of(model_spec(MTP_FAMILIES["glm4_moe"], has_mtp=True))
    assert Feature.PARTIAL_ROTARY in features_of(model_spec(FAMILIES["glm4_moe"]))
    scaled = FAMILIES["llama"] | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}}
    assert Feature.ROPE_SCALING in features_of(model_spec(scaled))


def test_features_are_described_in_words():
    assert describe(frozenset({Feature.SINKS, Feature.MLA})) == "attention sinks, multi-head latent attention"


GROUPED = FAMILIES["deepseek_v3"] | {"num_experts_per_tok": 4, "topk_group": 2, "n_group": 4}
V2_GROUPED = FAMILIES["deepseek_v2"] | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}


@pytest.mark.parametrize(
    ("model", "obstacle"),
    [
        (FAMILIES["llama-biased"], "biases in some linear layers only"),
        (FAMILIES["qwen3_moe"] | {"num_experts_per_tok": 1}, "rescaled scores with one expert per token"),
        (GROUPED | {"norm_topk_prob": False}, "sigmoid scores that are not rescaled"),
        (GROUPED | {"num_experts_per_tok": 3}, "expert groups ranked by 2 scores, where Megatron-core ranks by 1"),
        (V2_GROUPED | {"num_experts_per_tok": 4}, "expert groups ranked by 1 scores, where Megatron-core ranks by 2"),
        (FAMILIES["deepseek_v3"] | {"rope_scaling": YARN}, "YaRN without rounded borders in latent attention"),
        (FAMILIES["glm4_moe"] | {"rope_scaling": YARN}, "YaRN on a part of each head"),
        (GROUPED | {"partial_rotary_factor": 0.5}, "a partial rotary embedding in latent attention"),
    ],
)
def test_what_megatron_computes_otherwise_is_an_obstacle(model, obstacle):
    assert any(obstacle in found for found in training_obstacles(model_spec(model)))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama-biased"}))
def test_a_plain_model_of_each_family_has_no_obstacle(family):
    model = GROUPED if family == "deepseek_v3" else FAMILIES[family]
    assert (
        training_obstacles(model_spec(model | {"n_group": 1, "topk_group": 1} if "n_group" in model else model)) == ()
    )


def test_prediction_layers_are_an_obstacle():
    (obstacle,) = training_obstacles(model_spec(MTP_FAMILIES["glm4_moe"], has_mtp=True))
    assert obstacle == "multi-token-prediction layers"
