"""What each family needs of an engine."""

import pytest

from hybridrl.layout.families import model_spec
from hybridrl.layout.features import Feature, describe, features_of
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES

NEEDS = {
    "qwen2": {Feature.QKV_BIAS},
    "llama": set(),
    "llama-biased": {Feature.QKV_BIAS, Feature.OUTPUT_BIAS},
    "qwen3": {Feature.QK_NORM},
    "qwen3_moe": {Feature.QK_NORM, Feature.EXPERTS},
    "qwen2_moe": {Feature.QKV_BIAS, Feature.EXPERTS, Feature.SHARED_EXPERTS, Feature.SHARED_EXPERT_GATE},
    "mixtral": {Feature.EXPERTS},
    "deepseek_v2": {Feature.MLA, Feature.EXPERTS, Feature.SHARED_EXPERTS, Feature.GROUPED_ROUTING},
    "gpt_oss": {
        Feature.QKV_BIAS,
        Feature.OUTPUT_BIAS,
        Feature.SINKS,
        Feature.SLIDING_WINDOW,
        Feature.EXPERTS,
        Feature.ROUTER_BIAS,
        Feature.EXPERT_BIAS,
        Feature.CLAMPED_SWIGLU,
    },
}


@pytest.mark.parametrize("family", NEEDS)
def test_a_family_needs_what_it_is_made_of(family):
    assert features_of(model_spec(FAMILIES[family])) == NEEDS[family]


def test_prediction_layers_and_scaled_rotary_embeddings_are_features():
    assert Feature.MTP in features_of(model_spec(MTP_FAMILIES["glm4_moe"], has_mtp=True))
    assert Feature.PARTIAL_ROTARY in features_of(model_spec(FAMILIES["glm4_moe"]))
    scaled = FAMILIES["llama"] | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert Feature.ROPE_SCALING in features_of(model_spec(scaled))


def test_features_are_described_in_words():
    assert describe(frozenset({Feature.SINKS, Feature.MLA})) == "attention sinks, multi-head latent attention"
