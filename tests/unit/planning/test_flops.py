"""Operations per token are those from which published model FLOP/s follow."""

from __future__ import annotations

import pytest

from hybridrl.layout.families import model_spec
from hybridrl.planning.flops import forward_flops, training_flops
from tests.unit.layout.models import QWEN3_DENSE
from tests.unit.planning.recipes import spec

# Model TFLOP/s over tokens/s per device, sequences of 4096: Megatron-Bridge, docs/model-verification/models, of 2026-08.
PUBLISHED = {
    "qwen3-30b-a3b": 199.12e12 / 8654.602,
    "qwen3-235b-a22b": 1300.44e12 / 8784.492,
    "deepseek-v3": 276.03e12 / 1061.206,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_operations_per_token_are_the_published_ones_to_a_thousandth(name):
    assert training_flops(spec(name, has_mtp=True), 4096) == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_small_model_is_counted_by_hand():
    model = model_spec(QWEN3_DENSE)
    # q and o 32 x 32, k and v 32 x 16, three matrices 32 x 48; two layers, and an output of 100 tokens. Of 10 tokens, 5 keys a query
    # on average: 2 x 5 x 32 for scores and values.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 5 * 32
    assert forward_flops(model, 10) == 2 * (2 * layer + 32 * 100)
    assert training_flops(model, 10) == 3 * forward_flops(model, 10)
