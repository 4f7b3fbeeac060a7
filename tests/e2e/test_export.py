"""The exported policy is an ordinary HF checkpoint: transformers, Megatron ranks and vLLM load it and agree on its log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.controller.run import train
from tests.e2e.runs import demo_config, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on TP 2 x PP 2 x EP 2 that exports its policy."""
    runs_dir = tmp_path_factory.mktemp("runs")
    assert train(demo_config(runs_dir, "first", "trainer.num_steps=1", "trainer.save_hf_at_end=true")) == 0
    return runs_dir / "first"


@pytest.fixture(scope="module")
def continued(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on another layout, TP 2 x EP 2 x ETP 1, that starts from the export in both engines."""
    runs_dir = tmp_path_factory.mktemp("runs")
    overrides = (f"model.path={trained / 'hf'}", "actor.parallel.pp_size=1", "trainer.num_steps=1")
    assert train(demo_config(runs_dir, "second", *overrides)) == 0
    return runs_dir / "second"


def test_megatron_and_vllm_load_the_export_and_agree(continued: Path) -> None:
    (row,) = read_metrics(continued)
    assert row["logprob/rollout_vs_old_abs_max"] < 1e-3


def test_transformers_loads_the_export_and_agrees_with_the_sampler(trained: Path, continued: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype="auto", experts_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    rows = pyarrow.parquet.read_table(continued / "rollouts" / "step_000000.parquet").to_pylist()[::16]
    for row in rows:
        tokens = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        mask = np.array(row["loss_mask"])
        sampled = np.array(row["rollout_logprobs"], dtype=np.float32)[mask]
        np.testing.assert_allclose(logprobs[mask[1:]], sampled, atol=1e-4)  # fp32, summed in another order
        assert tokenizer.decode(row["token_ids"]).replace(" ", "")
