"""Megatron computes what transformers computes, from the same files, and writes them back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridrl.config.choices import Precision
from hybridrl.config.schema import MicroBatchConfig, ParallelConfig
from hybridrl.data.batch import SequenceBatch
from hybridrl.layout.families import model_spec
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import RankError, run_ranks

TEMPERATURE = 0.8
FAMILIES = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, ranks.MOE),
    "qwen3_moe_unnormalized": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**ranks.MOE, "norm_topk_prob": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, ranks.DENSE),
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {**ranks.DENSE, "tie_word_embeddings": True}),
}


def make_checkpoint(family, folder, dtype=torch.float32):
    config_class, model_class, fields = FAMILIES[family]
    torch.manual_seed(3)
    model = model_class(config_class(**fields, experts_implementation="eager")).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval(), fields


@torch.no_grad()
def reference(model, sequences):
    logits = model(torch.from_numpy(sequences.token_ids).long()).logits.double() / TEMPERATURE
    logs = logits.log_softmax(-1)
    targets = torch.from_numpy(sequences.token_ids).long()[:, 1:]
    logprobs, entropies = (
        torch.zeros(targets.shape[0], targets.shape[1] + 1),
        torch.zeros(targets.shape[0], targets.shape[1] + 1),
    )
    logprobs[:, 1:] = logs[:, :-1].gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropies[:, 1:] = -(logs.exp() * logs).sum(-1)[:, :-1]
    beyond = np.arange(logprobs.shape[1]) >= sequences.lengths[:, None]
    logprobs[beyond], entropies[beyond] = 0, 0
    return logprobs.numpy(), entropies.numpy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp_size=2, pp_size=2)], ids=["tp1", "tp2pp2"])
def test_log_probs_and_entropies_equal_transformers(family, parallel, tmp_path):
    model, fields = make_checkpoint(family, tmp_path / "hf")
    sequences = ranks.ragged_batch(7, 61, seed=5).sequences
    setup = ranks.Setup(
        fields, ranks.random_weights(model_spec(fields)), parallel, micro_batch=MicroBatchConfig(tokens=48)
    )
    results = run_ranks(
        ranks.load_and_logprobs, parallel.tp_size * parallel.pp_size, setup, tmp_path / "hf", sequences, TEMPERATURE
    )
    (result,) = [result for result in results if result]
    want_logprobs, want_entropies = reference(model, sequences)
    # float32 through 4 layers; measured 3e-6.
    np.testing.assert_allclose(result.logprobs, want_logprobs, atol=1e-4)
    np.testing.assert_allclose(result.entropies, want_entropies, atol=1e-4)


def test_vocabulary_padding_does_not_change_log_probs(tmp_path):
    _, fields = make_checkpoint("qwen3_moe", tmp_path / "hf")
    sequences = ranks.ragged_batch(7, 61, seed=5).sequences
    parallel = ParallelConfig(tp_size=2)
    results = []
    for divisor in (1, 32, 64):  # with 64 the second rank's columns are all padding
        setup = ranks.Setup(fields, ranks.random_weights(model_spec(fields)), parallel, vocab_divisor=divisor)
        results.append(run_ranks(ranks.load_and_logprobs, 2, setup, tmp_path / "hf", sequences, TEMPERATURE)[0])
    for padded in results[1:]:
        np.testing.assert_allclose(padded.logprobs, results[0].logprobs, atol=2e-6)
        np.testing.assert_allclose(padded.entropies, results[0].entropies, atol=2e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_tied"])
def test_import_then_export_is_bit_identical(family, tmp_path):
    _, fields = make_checkpoint(family, tmp_path / "hf", torch.bfloat16)
    parallel = ParallelConfig(tp_size=2, pp_size=2, ep_size=2 if "moe" in family else 1)
    setup = ranks.Setup(
        fields, ranks.random_weights(model_spec(fields)), parallel, precision=Precision.BFLOAT16, vocab_divisor=8
    )
    run_ranks(ranks.load_and_save, 4, setup, tmp_path / "hf", tmp_path / "export")
    original, exported = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "export/model.safetensors")
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    assert (tmp_path / "export/config.json").read_text() == (tmp_path / "hf/config.json").read_text()


def test_every_rank_hears_why_an_export_failed(tmp_path):
    (tmp_path / "export").mkdir()
    setup = ranks.Setup(ranks.MOE, ranks.random_weights(model_spec(ranks.MOE)), ParallelConfig(pp_size=2))
    messages = run_ranks(ranks.save_again, 2, setup, tmp_path, tmp_path / "export")
    assert all("export: exists already; choose another folder" in message for message in messages)


def test_a_failing_rank_is_the_one_that_is_shown(tmp_path):
    setup = ranks.Setup(ranks.MOE, ranks.random_weights(model_spec(ranks.MOE)), ParallelConfig(pp_size=2))
    sequences = SequenceBatch(np.zeros((1, 4), np.int32), np.array([4], np.int32))
    with pytest.raises(RankError, match=r"(?s)failed first.*no \*\.safetensors files"):
        run_ranks(ranks.load_and_logprobs, 2, setup, tmp_path, sequences, TEMPERATURE)
