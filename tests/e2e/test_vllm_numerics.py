"""vLLM computes the logits that transformers computes, family by family, in one process."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from hybridrl.config.schema import Platform, RolloutConfig
from tests.family_models import FAMILIES, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
# vLLM 0.32 on CPU rotates latent attention wrongly when its rotary embedding is plain.
WRONG_IN_VLLM = {"moonlight"}


def score(folder):
    from hybridrl.engines.vllm.settings import environment

    os.environ.update(environment(Platform.CPU, RolloutConfig(kv_cache_gib=1), None))
    from hybridrl.engines.vllm.logits import prompt_logits

    return prompt_logits(folder, TOKENS).numpy()


@pytest.fixture(scope="module")
def vllm_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WRONG_IN_VLLM))
def test_logits_equal_transformers(family, vllm_process, tmp_path):
    model = make_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0, :-1]
    got = torch.from_numpy(vllm_process.apply_async(score, (tmp_path,)).get(timeout=200))
    # float32, logits up to 30; measured 2.7e-5.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
