"""The sampler's choice of experts, as recorded, is what transformers' router chooses for the same tokens."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.data.generation import SamplingSpec
from tests.e2e.rollout_world import rollout_world
from tests.e2e.tiny_models import save_qwen3_moe

PROMPTS = [tuple(range(5, 5 + length)) for length in (1, 7, 30, 12)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_recorded_experts_are_those_that_transformers_chooses(tmp_path, tp_size):
    folder = save_qwen3_moe(tmp_path / "model", seed=1)
    with rollout_world(folder, moe_layers=(0, 1), tp_size=tp_size) as world:

        async def play():
            spec = SamplingSpec(1.0, 1.0, 20, (), 3)
            return await asyncio.gather(*(world.engine.generate(prompt, spec) for prompt in PROMPTS))

        completions = world.run(play())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([*prompt, *completion.token_ids])[:-1]
        with torch.no_grad():
            logits = model(tokens[None], output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1)
        assert completion.routing.shape == (len(tokens), 2, 2)
        assert np.array_equal(np.sort(completion.routing, -1), chosen.sort(-1).values.numpy())
