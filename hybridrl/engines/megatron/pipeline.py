"""Runs micro-batches through the pipeline: Megatron-core's schedules with our loss.

The schedule calls :meth:`Pipeline._step` on every stage; only the last stage sees logits. With
``calculate_per_token_loss`` Megatron neither divides by the number of micro-batches nor averages over data-parallel
ranks, and gradients are finalised without a token count, so the gradient is that of the plain sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.engines.megatron.expert_balance import ExpertBalance
from hybridrl.engines.megatron.logprobs import VocabSlice, token_logprobs
from hybridrl.engines.megatron.micro_batches import MicroBatch
from hybridrl.engines.megatron.objectives import Values
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.router_replay import RouterReplay
from hybridrl.observability.heartbeat import HEARTBEAT

LossFunction = Callable[[torch.Tensor, torch.Tensor, Values], tuple[torch.Tensor, torch.Tensor]]
"""(logprobs, entropies, values) of picked tokens -> loss of the micro-batch, summed, and the vector of its sums."""


@dataclass(frozen=True, slots=True)
class MicroResult:
    """What the last stage keeps of one micro-batch.

    Attributes:
        logprobs: [num_picked] float32; of a model with a value head its values.
        entropies: [num_picked] float32; 0 of a model with a value head.
        sums: What the objective sums up, float64, or None in a forward pass without a loss.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    sums: torch.Tensor | None


class Pipeline:
    """The schedule of one rank.

    Args:
        chunks: Model chunks, as the schedule runs them.
        vocab: This rank's columns of the logits; None for a model with a value head.
        replay: The routers, when they record or replay.
        balance: The routers, when they are trained.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        groups: ProcessGroups,
        vocab: VocabSlice | None,
        replay: RouterReplay | None,
        balance: ExpertBalance | None,
    ) -> None:
        self._chunks = list(chunks)
        self._groups = groups
        self._vocab = vocab
        self._replay = replay
        self._balance = balance
        config.finalize_model_grads_func = _finalize
        self._communicator = P2PCommunicator(groups.collection.pp, config) if groups.sizes.pp > 1 else None
        self._schedule = get_forward_backward_func(
            pp_size=groups.sizes.pp, vp_size=len(self._chunks) if len(self._chunks) > 1 else None
        )

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch], temperature: float) -> list[MicroResult]:
        """Return log-probs per micro-batch; empty except on the last stage. Collective over all ranks."""
        return self._run(batches, temperature, None)

    def forward_backward(
        self, batches: Sequence[MicroBatch], temperature: float, objective: LossFunction
    ) -> list[MicroResult]:
        """Add the gradient of the summed loss to the gradient buffers, and reduce them over ranks. Collective over all ranks."""
        return self._run(batches, temperature, objective)

    def _run(
        self, batches: Sequence[MicroBatch], temperature: float, objective: LossFunction | None
    ) -> list[MicroResult]:
        results: list[MicroResult] = self._schedule(
            forward_step_func=partial(self._step, temperature=temperature, objective=objective),
            data_iterator=[iter(batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(batches),
            # Stages exchange the shapes of packed micro-batches, which differ: see variable_seq_lengths.
            seq_length=batches[0].token_ids.size(1),
            micro_batch_size=1,
            forward_only=objective is None,
            collect_non_loss_data=objective is None,
            p2p_communicator=self._communicator,
            pg_collection=self._groups.collection,
        )
        return results

    def _step(
        self, data: Iterator[MicroBatch], model: torch.nn.Module, *, temperature: float, objective: LossFunction | None
    ) -> tuple[torch.Tensor, Callable[..., object]]:
        HEARTBEAT.advance()
        batch = next(data)
        if self._replay:
            self._replay.enter(self._chunks.index(model), batch.places)
        if self._balance:
            self._balance.enter(self._chunks.index(model), batch)
        output = model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed,
        )
        return output, partial(self._loss, batch, temperature, objective)

    def _loss(
        self,
        batch: MicroBatch,
        temperature: float,
        objective: LossFunction | None,
        logits: torch.Tensor,
        non_loss_data: bool = False,
    ) -> object:
        rows = logits.view(-1, logits.size(-1)).index_select(0, batch.predicting)
        if self._vocab is None:
            logprobs, entropies = rows[:, 0], torch.zeros(len(rows), device=rows.device)
        else:
            logprobs, entropies = token_logprobs(rows, batch.targets, self._vocab, temperature)
        if objective is None:
            return MicroResult(logprobs, entropies, None)
        loss, sums = objective(logprobs, entropies, batch.values)
        num_tokens = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, num_tokens, MicroResult(logprobs.detach(), entropies.detach(), sums)


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: object) -> None:
    finalize_model_grads(model, None, **kwargs)
