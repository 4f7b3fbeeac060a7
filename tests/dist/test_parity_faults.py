"""The parity check names the layer, the operator and the cause of faults planted into Megatron models."""

from __future__ import annotations

import pytest
import torch

from hybridrl.engines.reference.activations import reference_activations
from hybridrl.parity.causes import likely_causes
from hybridrl.parity.compare import differences, first_over
from hybridrl.parity.options import ParityOptions
from tests.dist import parity_faults as faults
from tests.dist.gloo import run_ranks
from tests.family_models import FAMILIES, make_model

TOKENS = torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = ParityOptions().tolerance
# Per family: each fault, where it must be found, and the beginning of the likeliest cause.
PLANTED = {
    "qwen3_moe": {
        faults.rope_theta: ("layer 0, query-key products", "rotary embedding"),
        faults.norm_epsilon: ("layer 0, input norm", "norm epsilon"),
        faults.score_function: ("layer 1, router weights", "score function"),
        faults.expert_order: ("layer 1, experts", "expert order: expert 2 computes what expert 5 should"),
        faults.router_order: ("layer 2, router logits", "expert order in the router: expert 0 computes"),
        faults.no_attention_scale: ("layer 0, attention scores", "attention scale: 5.65685 times"),
        faults.residual_twice: ("layer 1, layer output", "residual connection"),
        faults.router_in_bfloat16: ("layer 1, router logits", "router dtype"),
        faults.output_bias: ("logits", "bias missing"),
    },
    "deepseek_v3": {
        faults.latent_norm_epsilon: ("layer 1, values", "norm epsilon inside latent attention"),
        faults.score_function: ("layer 1, router weights", "score function"),
        faults.no_correction_bias: ("layer 1, router weights", "correction bias"),
        faults.expert_order: ("layer 1, experts", "expert order: expert 2 computes what expert 5 should"),
        faults.no_attention_scale: ("layer 0, attention scores", "attention scale"),
        faults.no_routed_scaling: ("layer 1, router weights", "routed scaling factor: all weights are 0.4 times"),
    },
    "glm4_moe": {
        faults.rope_theta: ("layer 0, query-key products", "rotary embedding"),
        faults.norm_epsilon: ("layer 0, input norm", "norm epsilon"),
        faults.no_correction_bias: ("layer 1, router weights", "correction bias"),
    },
    "gpt_oss": {
        faults.no_router_bias: ("layer 0, router logits", "bias of the router"),
        faults.no_window: ("layer 0, core attention", "mask or sliding window: token 8"),
        faults.no_query_bias: ("layer 0, values", "bias missing"),
    },
}


@pytest.fixture(scope="module", params=PLANTED)
def scored(request, tmp_path_factory):
    """Return the reference and, per fault, what Megatron then computes."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(FAMILIES[request.param]).save_pretrained(folder)
    planted = PLANTED[request.param]
    (found,) = run_ranks(faults.activations_with, 1, folder, TOKENS, [faults.nothing, *planted])
    return reference_activations(folder, TOKENS), found, planted


def test_planted_faults_are_found_with_layer_operator_and_cause(scored):
    want, (_, *found), planted = scored
    results = {}
    for fault, got in zip(planted, found, strict=True):
        over = first_over(differences(got, want), TOLERANCE)
        assert over is not None, fault
        results[fault.__name__] = str(over.site), likely_causes(over.site, got, want)[0], over.relative
    print(*results.items(), sep="\n")
    for fault, (place, cause) in planted.items():
        assert results[fault.__name__][0] == place, fault
        assert results[fault.__name__][1].startswith(cause), fault


def test_without_a_fault_every_operator_agrees(scored):
    want, (got, *_), _ = scored
    # Rounding stays far below the bound; measured 4.6e-6.
    assert max(difference.relative for difference in differences(got, want)) < TOLERANCE / 5
    assert got.values.keys() == want.values.keys()
