"""The cost of a sequence is the number of multiplications of its forward pass."""

from __future__ import annotations

import numpy as np
import pytest

from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.families import model_spec

QWEN = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True}
ATTENTION = 8 * (2 * 16 + 2 * 8)


@pytest.mark.parametrize(
    ("model", "mlp"),
    [({"model_type": "qwen3"}, 3 * 8 * 16), ({"model_type": "qwen3_moe", **EXPERTS}, 2 * 3 * 8 * 6 + 8 * 4)],
    ids=["dense", "experts"],
)
def test_linear_cost_counts_the_matrices_that_a_token_meets(model: dict[str, object], mlp: int) -> None:
    cost = sequence_cost(model_spec({**QWEN, **model}))
    assert cost.linear == 2 * (ATTENTION + mlp) + 8 * 32
    assert cost.quadratic == 2 * 16
    np.testing.assert_array_equal(cost(np.array([0, 10], np.int32)), [0, 10 * cost.linear + 100 * cost.quadratic])
