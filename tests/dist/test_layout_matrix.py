"""Loss, log-probs and every gradient are those of one rank, in every layout, packing and micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch

from hybridrl.config.choices import Recompute
from hybridrl.config.schema import MicroBatchConfig, MoeConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import layout_matrix
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks
from tests.family_models import FAMILIES

NUM_ROWS = 11
WORLD_SIZE = 8
SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4}
MODELS = {
    "moe": {**ranks.MOE, "num_experts": 4},
    "dense": ranks.DENSE,
    "tied": {**ranks.DENSE, "tie_word_embeddings": True},
    "deep": {**ranks.MOE, "num_experts": 4, "num_hidden_layers": 8},
    # Latent attention, a dense first layer, shared experts, a sigmoid router with groups and a bias.
    "mla": {
        **FAMILIES["deepseek_v3"],
        **SMALL,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Windows, sinks, biases.
    "sinks": {**FAMILIES["gpt_oss"], **SMALL, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4},
}
# Weights as large as the policy loss, so that a wrong term shows in the gradients.
BALANCE = MoeConfig(aux_loss_coef=0.1, z_loss_coef=0.1)
MODEL_BALANCE = {
    "dense": MoeConfig(),
    "tied": MoeConfig(),
    "mla": replace(BALANCE, bias_update_rate=0.01),
}


@dataclass(frozen=True)
class Layout:
    """One row of the matrix; `sizes` are fields of ParallelConfig without their ``_size``."""

    model: str
    sizes: dict[str, int] = field(default_factory=dict)
    tokens: int = 40
    is_packed: bool = True
    recompute: Recompute = Recompute.NONE
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**{f"{axis}_size": size for axis, size in self.sizes.items()}, **self.extra)

    def __str__(self) -> str:
        sizes = "".join(f"{axis}{size}" for axis, size in self.sizes.items())
        extra = "".join(f"-{name}={value}" for name, value in self.extra.items())
        packed = "" if self.is_packed else "-padded"
        return f"{self.model}-{sizes}-{self.tokens}{packed}-{self.recompute.value}{extra}"


FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
LAYOUTS = [
    Layout("moe", {}, 16),
    Layout("moe", {}, 1000, is_packed=False),
    Layout("moe", {}, recompute=FULL),
    Layout("dense", {}, recompute=SELECTIVE),
    Layout("moe", {"tp": 2}, 24),
    Layout("moe", {"tp": 2, "etp": 2}, is_packed=False),
    Layout("moe", {"tp": 2, "ep": 2}, recompute=FULL),
    Layout("moe", {"tp": 4, "ep": 2, "etp": 2}),
    Layout("moe", {"dp": 2, "ep": 2}, 16),
    Layout("moe", {"dp": 4, "ep": 2}, recompute=SELECTIVE),
    Layout("moe", {"dp": 2, "tp": 2, "ep": 4}),
    Layout("moe", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, is_packed=False),
    Layout("moe", {"cp": 2}),
    Layout("moe", {"cp": 2, "ep": 2}, 20, recompute=FULL),
    Layout("moe", {"cp": 2, "tp": 2, "ep": 4}),
    Layout("moe", {"cp": 2, "dp": 2, "ep": 4}, is_packed=False),
    Layout("moe", {"cp": 4, "etp": 2}),
    Layout("moe", {"pp": 2}, 16),
    Layout("moe", {"pp": 2, "vpp": 2}),
    Layout("moe", {"pp": 2, "vpp": 2, "ep": 2, "tp": 2}, 24, recompute=FULL),
    Layout("moe", {"pp": 2, "cp": 2, "tp": 2, "ep": 2}, recompute=SELECTIVE),
    Layout("moe", {"pp": 2, "vpp": 2, "dp": 2, "cp": 2, "ep": 2}),
    Layout("moe", {"pp": 4, "ep": 2, "dp": 2}, 16),
    Layout("moe", {"pp": 2}, extra={"num_layers_in_first_pipeline_stage": 1}),
    Layout("moe", {"pp": 2, "vpp": 2}, 20, extra={"pipeline_layout": "Et|tt|t|L"}),
    Layout("dense", {"cp": 2, "tp": 2}, extra={"sequence_parallel": False}),
    Layout("dense", {"tp": 2, "pp": 2, "vpp": 2}, is_packed=False),
    Layout("dense", {"dp": 2, "cp": 2, "pp": 2}, 16, recompute=FULL),
    Layout("tied", {"tp": 2, "pp": 2, "cp": 2}),
    Layout("tied", {"pp": 2, "vpp": 2, "dp": 2}, recompute=SELECTIVE),
    Layout("deep", {"pp": 4, "vpp": 2, "ep": 2, "tp": 2}),
    Layout("mla", {"tp": 2}, 24),
    Layout("mla", {"pp": 2, "vpp": 2}, recompute=FULL),
    Layout("mla", {"cp": 2}),
    Layout("mla", {"dp": 2, "ep": 2}, 16),
    Layout("mla", {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, 24),
    Layout("sinks", {"cp": 2}),
    Layout("sinks", {"cp": 2, "tp": 2, "ep": 2}, 24),
]
BATCH = ranks.ragged_batch(NUM_ROWS, 61)


def setup_of(layout: Layout) -> ranks.Setup:
    fields = MODELS[layout.model]
    return ranks.Setup(
        fields,
        ranks.random_weights(model_spec(fields)),
        layout.parallel,
        ranks.SHOW_GRADIENT,
        micro_batch=MicroBatchConfig(layout.tokens, layout.is_packed),
        recompute=layout.recompute,
        moe=MODEL_BALANCE.get(layout.model, BALANCE),
    )


@cache
def outcomes() -> dict[str, list[layout_matrix.Outcome]]:
    """Run everything once: the references first, and layouts of few ranks side by side with nothing."""
    chosen = [*(Layout(model, {}, 1000) for model in MODELS), *LAYOUTS]
    setups = [setup_of(layout) for layout in chosen]
    by_rank = run_ranks(layout_matrix.run_all, WORLD_SIZE, setups, [BATCH] * len(setups), WORLD_SIZE, timeout_s=360)
    return {
        str(layout): [by_rank[rank][number] for rank in range(parallel_sizes(layout.parallel).world_size)]
        for number, layout in enumerate(chosen)
    }


def merged(layout: Layout) -> tuple[np.ndarray, np.ndarray, list, dict[str, torch.Tensor]]:
    logprobs, during = (np.full(BATCH.loss_mask.shape, np.nan, dtype=np.float32) for _ in range(2))
    gradients = {t.name: torch.full(t.shape, torch.nan) for t in model_spec(MODELS[layout.model]).tensors().values()}
    reported = []
    for rows, before, metrics, parts in outcomes()[str(layout)]:
        if before is not None:
            logprobs[rows], during[rows] = before.logprobs, metrics.logprobs
            reported.append(metrics)
        for name, box, values in parts:
            held = gradients[name][box]
            assert torch.equal(held[~held.isnan()], values[~held.isnan()]), f"replicas of {name} differ"
            gradients[name][box] = values
    return logprobs, during, reported, gradients


# The first of these runs all layouts; the bound is for machines that are busy with other work.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_changes_neither_loss_nor_gradients(layout: Layout) -> None:
    want_logprobs, _, (want,), want_gradients = merged(Layout(layout.model, {}, 1000))
    logprobs, during, reported, gradients = merged(layout)
    np.testing.assert_allclose(logprobs, want_logprobs, atol=5e-5)  # float32 sums in another order
    # Attention with sinks takes another kernel of torch where their gradient is wanted.
    atol = 1e-5 if layout.model == "sinks" else 1e-6
    np.testing.assert_allclose(during[BATCH.loss_mask], logprobs[BATCH.loss_mask], atol=atol)
    assert len(reported) == parallel_sizes(layout.parallel).dp
    for metrics in reported:
        for name in ("loss", "grad_norm", "entropy", "approx_kl", "clip_fraction", "ratio_mean", "ref_kl"):
            assert getattr(metrics, name) == pytest.approx(getattr(want, name), rel=1e-5), name
        assert metrics.num_tokens == want.num_tokens and not metrics.is_skipped
        for name in ("aux_loss", "z_loss", "max_load") if want.balance else ():
            assert getattr(metrics.balance, name) == pytest.approx(getattr(want.balance, name), rel=1e-5), name
    for name, gradient in gradients.items():
        error, norm = float((gradient - want_gradients[name]).norm()), float(want_gradients[name].norm())
        assert error <= 2e-5 * norm, f"{name}: the gradient differs by {error:.1e}, its norm is {norm:.1e}"
