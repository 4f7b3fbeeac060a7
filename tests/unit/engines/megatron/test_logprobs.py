"""Vocab-parallel log-probs against float64 softmax, on ranks that are threads of this process."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from hybridrl.engines.megatron import logprobs as module
from hybridrl.engines.megatron.logprobs import VocabSlice, token_logprobs


class ThreadGroup:
    """Stands for a process group of `world_size` threads."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._world_size = world_size
        self._given: dict[int, torch.Tensor] = {}

    def size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self._given[threading.get_ident()] = tensor.clone()
        self._barrier.wait(10)
        given = torch.stack(list(self._given.values()))
        self._barrier.wait(10)
        tensor.copy_(given.amax(0) if op == dist.ReduceOp.MAX else given.sum(0))


@pytest.fixture
def thread_groups(monkeypatch):
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        group.all_reduce(tensor, op)

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)


def run(logits, targets, vocab_size, tp, temperature, grads):
    """Return log-probs, entropies and the gradient of the whole logits, computed by `tp` threads."""
    group, columns = ThreadGroup(tp), logits.shape[1] // tp
    out = [None] * tp

    def rank(index):
        mine = logits[:, index * columns : (index + 1) * columns].clone().requires_grad_()
        vocab = VocabSlice.of_rank(index, columns, vocab_size, group)
        logprobs, entropies = token_logprobs(mine, targets, vocab, temperature)
        if grads:
            torch.autograd.backward([logprobs, entropies], list(grads))
        out[index] = (logprobs.detach(), entropies.detach(), mine.grad)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(out[0][0], one[0]) and torch.equal(out[0][1], one[1]) for one in out)
    gradient = torch.cat([one[2] for one in out], dim=1) if grads else None
    return out[0][0], out[0][1], gradient


def reference(logits, targets, vocab_size, temperature, grads):
    exact = logits.double().requires_grad_()
    logs = (exact[:, :vocab_size] / temperature).log_softmax(-1)
    logprobs = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropies = -(logs.exp() * logs).sum(-1)
    torch.autograd.backward([logprobs, entropies], [grad.double() for grad in grads])
    return logprobs.detach().float(), entropies.detach().float(), exact.grad.float()


@pytest.mark.parametrize(
    ("padded", "vocab_size", "tp"), [(12, 12, 1), (12, 10, 1), (12, 12, 2), (12, 11, 4), (16, 7, 4), (16, 8, 2)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_a_float64_softmax_over_real_tokens(
    thread_groups, padded, vocab_size, tp, temperature
):
    generator = torch.Generator().manual_seed(padded * tp)
    logits = torch.randn(9, padded, generator=generator) * 4
    targets = torch.randint(0, vocab_size, (9,), generator=generator)
    grads = (torch.randn(9, generator=generator), torch.randn(9, generator=generator))
    got = run(logits, targets, vocab_size, tp, temperature, grads)
    want = reference(logits, targets, vocab_size, temperature, grads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)  # float32 arithmetic
    assert not got[2][:, vocab_size:].any()


def test_large_logits_stay_finite(thread_groups):
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4 - 1]])
    logprobs, entropies, _ = run(logits, torch.tensor([1]), 4, 2, 1.0, None)
    assert logprobs.item() == pytest.approx(-2e4, abs=1) and entropies.item() == pytest.approx(0.5822, abs=1e-3)


def test_no_tokens_give_no_log_probs(thread_groups):
    logprobs, entropies, gradient = run(
        torch.zeros(0, 8), torch.zeros(0, dtype=torch.long), 8, 2, 1.0, (torch.zeros(0), torch.zeros(0))
    )
    assert logprobs.shape == entropies.shape == (0,) and gradient.shape == (0, 8)
