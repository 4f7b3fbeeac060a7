"""Every family: Megatron computes what transformers computes and writes the checkpoint back bit for bit."""

from __future__ import annotations

import megatron.core
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.features import Feature, features_of
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks
from tests.dist.test_megatron_parity import TEMPERATURE, reference
from tests.family_models import FAMILIES, make_model

# Longer than the windows and than the original context of the scaled rotary embeddings.
SEQUENCES = ranks.ragged_batch(5, 128, seed=5, width=48, max_tokens=48).sequences


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Return the folder of a checkpoint, and log-probs and entropies by transformers."""
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    model = make_model(FAMILIES[request.param])
    model.save_pretrained(folder)
    return folder, reference(model, SEQUENCES)


@pytest.mark.parametrize("degree", [1, 2])
def test_log_probs_equal_transformers_and_export_is_bit_identical(family, degree, tmp_path):
    folder, (want_logprobs, want_entropies) = family
    spec = read_model_spec(folder)
    ep_size = degree if Feature.EXPERTS in features_of(spec) else 1
    if getattr(spec.layers[0].attention, "q_lora_rank", 0) is None and megatron.core.__version__ >= "0.17":
        pytest.skip("without Transformer Engine, megatron-core 0.17 and later cannot build MLA without q_lora")
    parallel = ParallelConfig(tp_size=degree, ep_size=ep_size)
    results = run_ranks(ranks.load_score_and_save, degree, parallel, folder, tmp_path / "export", SEQUENCES, TEMPERATURE)
    # float32 through 3 layers, log-probs down to -20; measured 1.2e-5.
    np.testing.assert_allclose(results[0].logprobs, want_logprobs, atol=1e-4)
    np.testing.assert_allclose(results[0].entropies, want_entropies, atol=1e-4)
    original, exported = load_file(folder / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
