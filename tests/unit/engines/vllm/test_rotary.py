"""vLLM's rotary operator on a CPU, and which models are kept from it."""

from __future__ import annotations

import json

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.platforms import current_platform

from hybridrl.config.choices import Platform
from hybridrl.engines.vllm.rotary import rotary_arguments
from tests.family_models import FAMILIES

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TURNED_OFF = ["-rotary_embedding"]
SIZE, THETA, NUM_TOKENS = 64, 10000.0, 70
POSITIONS = torch.arange(5, 5 + NUM_TOKENS)


def arguments(tmp_path, fields, platform=Platform.CPU):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return rotary_arguments(tmp_path, platform)


@pytest.mark.parametrize(
    "fields",
    [FAMILIES["moonlight"], FAMILIES["deepseek_v3"] | PLAIN, FAMILIES["deepseek_v2"] | PLAIN],
    ids=["v3-without-q-lora", "v3", "v2"],
)
def test_plain_latent_attention_on_a_cpu_goes_without_the_operator(fields, tmp_path):
    assert arguments(tmp_path, fields) == {"compilation_config": {"custom_ops": TURNED_OFF}}
    assert arguments(tmp_path, fields, Platform.CUDA) == {}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"moonlight"}))
def test_yarn_and_other_attention_are_left_alone(family, tmp_path):
    assert arguments(tmp_path, FAMILIES[family]) == {}


def rotation_error(custom_ops: list[str], *, is_flat: bool) -> float:
    """Rotate what latent attention rotates, [tokens, heads, size] cut from wider tensors, or the same as [tokens, heads * size].

    Returns:
        The largest difference of query and key from pairs turned in float64.
    """
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(NUM_TOKENS, 4, 32 + SIZE, generator=generator)[..., 32:]
    key = torch.randn(NUM_TOKENS, 48 + SIZE, generator=generator)[:, 48:].unsqueeze(1)
    frequencies = THETA ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    turns = torch.polar(torch.ones(()).double(), POSITIONS[:, None] * frequencies)[:, None]
    pairs = (torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2))) for x in (query, key))
    want = [torch.view_as_real(x * turns).flatten(-2) for x in pairs]
    if is_flat:
        query, key = query.flatten(1), key.flatten(1)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=custom_ops))):
        rotary = RotaryEmbedding(SIZE, SIZE, 256, THETA, False, torch.float32)
    got = rotary(POSITIONS, query, key)
    return max(float((g.double().reshape(w.shape) - w).abs().max()) for g, w in zip(got, want, strict=True))


@pytest.fixture
def _operators():
    if not current_platform.is_cpu():
        pytest.skip("the operator of vLLM's CPU build")
    current_platform.import_kernels()


# float32 against float64; the angle of position 74 is rounded to 4e-6. Measured 5.8e-6.
EXACT = 5e-5


@pytest.mark.usefixtures("_operators")
def test_the_pytorch_form_turns_the_heads_of_latent_attention_by_their_positions():
    assert rotation_error(["all", *TURNED_OFF], is_flat=False) < EXACT


@pytest.mark.usefixtures("_operators")
def test_the_operator_is_right_on_flat_heads_and_still_wrong_on_those_of_latent_attention():
    assert rotation_error(["all"], is_flat=True) < EXACT
    assert rotation_error(["all"], is_flat=False) > 1.0, (
        "vLLM has mended its operator: delete hybridrl/engines/vllm/rotary.py and this file"
    )
