"""How evenly tokens spread over experts: measured in every update, and pushed towards even when asked for.

Megatron-core's own terms are means over one micro-batch, count alignment tokens and are scaled for a loss that is a mean.
Here every term is defined over the global batch, so that packing, micro-batch size and layout do not change it:

    load-balancing loss   mean over sequences of  sum_i f_i p_i,  in each layer
                          f_i = (experts / (top_k T)) * tokens of the sequence with expert i among their top-k scores
                          p_i = mean over the T tokens of the sequence of expert i's normalised score
    z-loss                mean over tokens of logsumexp(router logits)^2, in each layer
    bias update           bias_i += rate * sign(mean load - load_i), once per optimizer step

A mean over a batch of f_i and of p_i would not do: it is no sum over sequences, so micro-batches could not add up to it.
The losses are attached to the router's logits, each rank's tokens on their own rank; gradients are summed like all others.

Sources: sequence-wise balance loss and bias update, DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); z-loss, ST-MoE (arXiv
2202.08906).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray

from hybridrl.config.schema import MoeConfig
from hybridrl.engines.megatron.micro_batches import MicroBatch
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.recomputation import MicroBatchCursor
from hybridrl.engines.megatron.results import BalanceMetrics
from hybridrl.errors import EngineError

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class ExpertBalance:
    """The routers of one rank.

    Args:
        chunks: Model chunks, in the order of the schedule.
        moe_layers: Decoder layers with experts, of the whole model.
        is_sequence_parallel: Whether each tp rank routes a share of the tokens.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        moe_layers: Sequence[int],
        config: MoeConfig,
        groups: ProcessGroups,
        *,
        is_sequence_parallel: bool,
    ) -> None:
        self._config, self._groups = config, groups
        self._num_slices = groups.sizes.tp if is_sequence_parallel else 1
        self._num_layers = len(moe_layers)
        self._layers: list[list[_LayerBalance]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._layers.append([_LayerBalance(moe_layers.index(r.layer_number - 1), r, r.routing) for r in routers])
        for layer in self._all():
            layer.router.routing = layer.route

    def start(self, lengths: NDArray[np.int32]) -> None:
        """Begin an update on rows of these lengths. Collective over the data-parallel ranks."""
        totals = torch.tensor([int((lengths > 0).sum()), int(lengths.sum())], device=self._groups.device)
        if self._groups.sizes.dp > 1:
            dist.all_reduce(totals, group=self._groups.collection.dp)
        num_sequences, num_tokens = totals.tolist()
        self._num_sequences, self._num_tokens = max(1, num_sequences), num_tokens
        aux_weight = self._config.aux_loss_coef / self._num_sequences
        z_weight = self._config.z_loss_coef / max(1, num_tokens)
        for layer in self._all():
            layer.start(aux_weight, z_weight)

    def enter(self, chunk: int, batch: MicroBatch) -> None:
        """Prepare the routers of a chunk for its next micro-batch."""
        lengths = torch.tensor(batch.packed.lengths, device=batch.places.device) // self._groups.sizes.cp
        sequences = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        # What is there for alignment only belongs to one more sequence, which counts for nothing.
        sequences = torch.where(batch.places >= 0, sequences, len(lengths))
        if self._num_slices > 1:
            sequences = sequences.chunk(self._num_slices)[self._groups.at.tp]
        for layer in self._layers[chunk]:
            layer.cursor.enter(_Tokens(sequences, len(lengths)))

    def finish(self, *, has_stepped: bool) -> BalanceMetrics:
        """End the update, moving biases if the optimizer has stepped. Collective over the role.

        Raises:
            EngineError: The routers saw other tokens than those of the batch.
        """
        experts = next((layer.router.num_experts for layer in self._all()), 0)
        width = torch.tensor(experts, device=self._groups.device)
        if self._groups.sizes.pp > 1:  # a stage may hold no experts
            dist.all_reduce(width, op=dist.ReduceOp.MAX, group=self._groups.collection.pp)
        sums = torch.zeros(self._num_layers, int(width) + 2, dtype=torch.float64, device=self._groups.device)
        for layer in self._all():
            sums[layer.index] = torch.cat([layer.loads, torch.stack([layer.aux_loss, layer.z_loss])])
            layer.is_active = False
        dist.all_reduce(sums)
        loads = sums[:, :-2]
        self._check(loads)
        if has_stepped and self._config.bias_update_rate:
            for layer in self._all():
                layer.move_bias(loads[layer.index], self._config.bias_update_rate)
        aux_loss, z_loss = sums[:, -2:].mean(0).tolist()
        max_load = float((loads.amax(1) / loads.mean(1).clamp(min=1e-9)).max())
        return BalanceMetrics(aux_loss / self._num_sequences, z_loss / max(1, self._num_tokens), max_load)

    def _check(self, loads: torch.Tensor) -> None:
        top_k = next((layer.router.topk for layer in self._all()), None)
        for index, num_choices in enumerate(loads.sum(1).tolist()):
            if top_k is not None and num_choices != self._num_tokens * top_k:
                raise EngineError(
                    f"expert balance: the router of MoE layer {index} chose {num_choices:.0f} experts for "
                    f"{self._num_tokens} tokens, expected {top_k} for each; it was not run once per token"
                )

    def _all(self) -> list[_LayerBalance]:
        return [layer for layers in self._layers for layer in layers]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens that a router gets.

    Attributes:
        sequences: [tokens] int64 number of the sequence in the micro-batch; `num_sequences` for alignment.
    """

    sequences: torch.Tensor
    num_sequences: int


@dataclass
class _LayerBalance:
    """One router; :meth:`route` takes the place of its ``routing``."""

    index: int
    router: TopKRouter
    original: Route
    cursor: MicroBatchCursor[_Tokens] = field(default_factory=MicroBatchCursor)
    is_active: bool = False
    aux_weight: float = 0.0
    z_weight: float = 0.0

    def start(self, aux_weight: float, z_weight: float) -> None:
        self.cursor.start(is_training=True)
        self.is_active = True
        self.aux_weight, self.z_weight = aux_weight, z_weight
        zeros = torch.zeros(self.router.num_experts + 2, dtype=torch.float64, device=self.router.weight.device)
        self.loads, self.aux_loss, self.z_loss = zeros[:-2], zeros[-2], zeros[-1]

    def route(self, logits: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (probs, routing_map), both [tokens, experts]."""
        tokens, is_repeated = self.cursor.take() if self.is_active else (None, False)
        if tokens is None:
            return self.original(logits, *args, **kwargs)
        if torch.is_grad_enabled():
            logits = self._attach_losses(logits, tokens)
        probs, routing_map = self.original(logits, *args, **kwargs)
        if not is_repeated:
            self.loads += routing_map[tokens.sequences < tokens.num_sequences].sum(0)
        return probs, routing_map

    def move_bias(self, loads: torch.Tensor, rate: float) -> None:
        bias = self.router.expert_bias
        assert bias is not None, f"MoE layer {self.index} has no routing bias"
        bias += rate * torch.sign(loads.mean() - loads).to(bias.dtype)

    def _attach_losses(self, logits: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        flat = logits.view(-1, logits.size(-1))
        if self.aux_weight:
            loss = self._aux_loss(flat, tokens)
            self.aux_loss += loss.detach()
            logits = MoEAuxLossAutoScaler.apply(logits, self.aux_weight * loss)
        if self.z_weight:
            is_real = tokens.sequences < tokens.num_sequences
            loss = flat.float().logsumexp(-1).square()[is_real].sum()
            self.z_loss += loss.detach()
            logits = MoEAuxLossAutoScaler.apply(logits, self.z_weight * loss)
        return logits

    def _aux_loss(self, logits: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        """Return this rank's part of the sum over the micro-batch's sequences. Collective over the tp and cp ranks."""
        router = self.router
        chosen, scores = compute_routing_scores_for_aux_loss(logits, router.topk, router.score_function)
        counts = scores.new_zeros(tokens.num_sequences + 1, router.num_experts)
        counts.index_add_(0, tokens.sequences, chosen.to(scores.dtype))
        if router.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=router.tp_cp_group)
        num_choices = counts.sum(1, keepdim=True).clamp(min=1)  # top_k * T
        # f_i / T of each sequence
        factors = counts * (router.num_experts * router.topk) / num_choices.square()
        factors[-1] = 0
        return (factors[tokens.sequences] * scores).sum()
