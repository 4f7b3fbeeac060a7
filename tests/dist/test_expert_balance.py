"""Balance between experts: losses, loads and bias updates are those that transformers' routers give; layouts are in the matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config.schema import MoeConfig, ParallelConfig
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks
from tests.family_models import FAMILIES, make_model

SEQUENCES = ranks.ragged_batch(5, 128, seed=5).sequences
AUX, Z, RATE = 0.7, 0.2, 0.01


@dataclass
class Routers:
    """What the gates of a transformers model returned, per row and layer, and what follows from it in float64."""

    num_experts: int
    top_k: int
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    chosen: list[list[torch.Tensor]] = field(default_factory=list)

    def losses(self, is_sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the load-balancing loss and the z-loss, each summed over layers."""
        aux = torch.zeros((), dtype=torch.float64)
        squares = []
        for row in self.logits:
            for logits in row:
                scores = logits.double().sigmoid() if is_sigmoid else logits.double().exp()
                scores = scores / scores.sum(-1, keepdim=True)
                counts = torch.bincount(scores.topk(self.top_k).indices.flatten(), minlength=self.num_experts)
                shares = counts * self.num_experts / (self.top_k * len(scores))
                aux = aux + (shares * scores.mean(0)).sum() / len(self.logits)
                squares.append(logits.double().logsumexp(-1).square())
        return aux, torch.cat(squares).sum() / sum(len(row[0]) for row in self.logits)

    def loads(self) -> list[torch.Tensor]:
        return [
            torch.bincount(torch.cat(layer).flatten(), minlength=self.num_experts).double()
            for layer in zip(*self.chosen, strict=True)
        ]


def run_transformers(model: torch.nn.Module, num_experts: int, top_k: int) -> Routers:
    routers = Routers(num_experts, top_k)

    def keep(_module: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        routers.logits[-1].append(output[0])
        routers.chosen[-1].append(output[2])

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(keep)
    for row, length in zip(SEQUENCES.token_ids, SEQUENCES.lengths, strict=True):
        routers.logits.append([])
        routers.chosen.append([])
        model(torch.from_numpy(row[None, :length]).long())
    return routers


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_losses_gradients_and_bias_updates_are_those_of_transformers(family, tmp_path):
    model = make_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    is_sigmoid = family == "deepseek_v3"
    routers = run_transformers(model, 8, FAMILIES[family]["num_experts_per_tok"])
    aux, z = routers.losses(is_sigmoid)
    (AUX * aux + Z * z).backward()
    setup = ranks.Setup(
        FAMILIES[family],
        load_file(tmp_path / "model.safetensors"),
        ParallelConfig(tp_size=2, ep_size=2),
        ranks.SHOW_GRADIENT,
        moe=MoeConfig(AUX, Z, RATE if is_sigmoid else 0.0),
    )
    ((metrics, slices), _) = run_ranks(ranks.step_without_loss, 2, setup, SEQUENCES)
    loads = routers.loads()
    assert metrics.loss == 0 and metrics.grad_norm > 0
    assert metrics.balance.aux_loss == pytest.approx(float(aux) / len(loads), rel=1e-5)
    assert metrics.balance.z_loss == pytest.approx(float(z) / len(loads), rel=1e-5)
    assert metrics.balance.max_load == max(float(load.max() / load.mean()) for load in loads)
    want = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    compared = 0
    for name, box, got in slices:
        if name in want:
            wanted = want[name][box]
            assert float((got - wanted).norm()) <= 1e-4 * float(wanted.norm()), name
            compared += name.endswith("mlp.gate.weight")
    assert compared == len(loads)
    biases = [got for name, _, got in slices if name.endswith("e_score_correction_bias")]
    for got, load in zip(biases, loads if is_sigmoid else [], strict=True):
        assert torch.allclose(got, -RATE * torch.sign(load.mean() - load).float(), atol=1e-6)
