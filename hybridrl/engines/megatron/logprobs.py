"""Log-probs and entropies over a vocabulary that is cut over tensor-parallel ranks.

Each rank keeps its own columns; only three numbers per token cross ranks. Padding columns, which no token owns, are left
out of the softmax.

Maths, with x = logits / temperature, m = max x, Z = sum exp(x - m), over all ranks' columns:
log p(t) = x_t - m - log Z and H = m + log Z - sum p x. Their gradients are d log p(t) / dx_j = [j = t] - p_j and
dH / dx_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class VocabSlice:
    """The columns of the logits that one tensor-parallel rank holds.

    Attributes:
        start: First token id.
        num_columns: Columns that stand for a token; those after them are padding.
        group: Ranks that hold the other columns.
    """

    start: int
    num_columns: int
    group: dist.ProcessGroup

    @classmethod
    def of_rank(cls, rank: int, columns_per_rank: int, vocab_size: int, group: dist.ProcessGroup) -> VocabSlice:
        """Return the slice of tensor-parallel rank `rank` of a padded vocabulary."""
        start = rank * columns_per_rank
        return cls(start, max(0, min(columns_per_rank, vocab_size - start)), group)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, vocab: VocabSlice, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of each row; both are differentiable. Collective over the tensor-parallel ranks.

    Args:
        logits: [num_tokens, columns of this rank] float; this rank's columns.
        targets: [num_tokens] int64 token ids; the same on every rank.
        temperature: Divides the logits.

    Returns:
        [num_tokens] float32 log-probs and [num_tokens] float32 entropies, equal on every rank.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, vocab, temperature)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab: VocabSlice, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits[:, : vocab.num_columns].float() / temperature
        top = scaled.amax(dim=-1) if vocab.num_columns else scaled.new_full((len(scaled),), -torch.inf)
        if vocab.group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=vocab.group)
        scaled -= top.unsqueeze(-1)
        weights = scaled.exp()
        local = targets - vocab.start
        owned = (local >= 0) & (local < vocab.num_columns)
        local = local.clamp(0, max(vocab.num_columns - 1, 0)).unsqueeze(-1)
        at_target = scaled.gather(-1, local).squeeze(-1) * owned if vocab.num_columns else torch.zeros_like(top)
        # exp of -inf times -inf would be NaN, but the largest logit is finite and no column is masked.
        sums = torch.stack([at_target, weights.sum(-1), (weights * scaled).sum(-1)])
        if vocab.group.size() > 1:
            dist.all_reduce(sums, group=vocab.group)
        target, total, weighted = sums
        log_total = total.log()
        probs = weights.div_(total.unsqueeze(-1))
        entropies = log_total - weighted / total
        ctx.save_for_backward(probs, scaled.sub_(log_total.unsqueeze(-1)), entropies, local, owned)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        ctx.set_materialize_grads(False)
        return target - log_total, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        probs, log_probs, entropies, local, owned = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=probs.device)
        num_columns = probs.size(-1)
        inner = torch.zeros_like(probs)
        if grad_logprobs is not None and num_columns:
            inner.addcmul_(probs, grad_logprobs.unsqueeze(-1), value=-1.0)
            inner.scatter_add_(-1, local, (grad_logprobs * owned).unsqueeze(-1))
        if grad_entropies is not None:
            inner.addcmul_(probs * (log_probs + entropies.unsqueeze(-1)), grad_entropies.unsqueeze(-1), value=-1.0)
        grad[:, :num_columns] = inner.div_(ctx.temperature)
        return grad, None, None, None
