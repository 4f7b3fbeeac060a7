"""The training engine: one Megatron-core model on the ranks of one role.

Every rank of a role holds one engine and calls the same methods in the same order; all methods that compute are
collective over the role. Each data-parallel rank brings its own rows, the same on all its tensor and pipeline ranks, and
its reporting rank (last pipeline stage, tp rank 0, cp rank 0) returns the result; other ranks return None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.choices import Platform, Precision, Recompute
from hybridrl.config.schema import MicroBatchConfig, MoeConfig, OptimizerConfig, ParallelConfig
from hybridrl.data.batch import PolicyBatch, SequenceBatch
from hybridrl.engines.megatron import cpu, micro_batches
from hybridrl.engines.megatron.expert_balance import ExpertBalance
from hybridrl.engines.megatron.logprobs import VocabSlice
from hybridrl.engines.megatron.micro_batches import MicroBatch, PackingRules, scatter_back
from hybridrl.engines.megatron.model import build_chunks, check_tensors, named_tensors
from hybridrl.engines.megatron.objectives import Objective, Sum, policy_objective, supervised_objective
from hybridrl.engines.megatron.optimizer import Optimizer, StepResult, wrap_chunks
from hybridrl.engines.megatron.pipeline import LossFunction, MicroResult, Pipeline
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.results import BalanceMetrics, LogprobResult, UpdateMetrics
from hybridrl.engines.megatron.router_replay import RouterReplay, Routing
from hybridrl.engines.megatron.training_state import TrainingState
from hybridrl.engines.megatron.transformer_config import choose_layer_spec, transformer_config
from hybridrl.errors import EngineError, HybridRLError, ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.megatron.pipeline import pipeline_layout
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import alignment, parallel_sizes, sequence_alignment
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.reshard.checkpoint import create_checkpoint, finish_checkpoint, load_checkpoint, write_checkpoint

_DTYPES = {Precision.FLOAT32: DType.FLOAT32, Precision.BFLOAT16: DType.BFLOAT16}


class MegatronEngine:
    """A model, and its optimizer when it is trained.

    Args:
        hf_folder: Checkpoint that exports copy config and tokenizer from.
        groups: From ``start_process_group``.
        optimizer: None for a frozen model.
        micro_batch: How rows are packed.
        num_optimizer_steps: Steps of the whole run; only decaying learning-rate schedules use it.
        vocab_divisor: The padded vocabulary is a multiple of this times tp.
        replays_routing: Whether updates take recorded experts: those of ``batch.routing``, or where log-probs are asked for without
            any, those that this pass then records and returns.
        moe: Balance between experts, of a model that has some.

    Raises:
        EngineError: When the model or the degrees are not supported, or the CPU adaptation is missing.
        LayoutError: When a size does not divide, or the built modules differ from the declared layout.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hf_folder: Path,
        parallel: ParallelConfig,
        precision: Precision,
        platform: Platform,
        optimizer: OptimizerConfig | None,
        micro_batch: MicroBatchConfig,
        seed: int,
        groups: ProcessGroups,
        num_optimizer_steps: int = 0,
        vocab_divisor: int = 1,
        recompute: Recompute = Recompute.NONE,
        replays_routing: bool = False,
        moe: MoeConfig | None = None,
    ) -> None:
        if platform is Platform.CPU and not cpu.is_installed():
            raise EngineError("the cpu platform needs hybridrl.engines.megatron.cpu.install() first, in this process")
        self._groups = groups
        self._hf_folder = hf_folder
        self.layout = MegatronLayout(
            spec,
            parallel_sizes(parallel),
            _DTYPES[precision],
            choose_layer_spec(platform),
            vocab_divisor,
            pipeline_layout(parallel),
        )
        self._shard_map = megatron_shard_map(self.layout, _place(groups.rank))
        config = transformer_config(spec, parallel, precision, platform, self.layout.layer_spec, recompute)
        self._packing = _packing_rules(micro_batch, parallel)
        self._cost = sequence_cost(spec)
        self._chunks = build_chunks(self.layout, config, groups, seed)
        check_tensors(self._shard_map, self.tensors())
        trained = wrap_chunks(self._chunks, config, precision, groups) if optimizer else None
        self._optimizer = (
            Optimizer(trained, optimizer, precision, groups, num_optimizer_steps) if trained and optimizer else None
        )
        self._state = (
            TrainingState(self._chunks, self._optimizer, self._shard_map, self.layout, groups)
            if self._optimizer
            else None
        )
        columns = self.layout.padded_vocab_size // parallel.tp_size
        vocab = VocabSlice.of_rank(groups.at.tp, columns, spec.vocab_size, groups.collection.tp)
        self._replay = (
            RouterReplay(self._chunks, _moe_layers(spec), groups, is_sequence_parallel=config.sequence_parallel)
            if replays_routing
            else None
        )
        self._balance = (
            ExpertBalance(
                self._chunks,
                spec.moe_layers,
                moe or MoeConfig(),
                groups,
                is_sequence_parallel=config.sequence_parallel,
            )
            if trained and spec.moe_layers
            else None
        )
        self._pipeline = Pipeline(
            trained or self._chunks, config, groups, None if spec.value_head else vocab, self._replay, self._balance
        )

    def shard_map(self, place: Place) -> ShardMap:
        """Return where this rank keeps its weights; `place` says whose memory that is."""
        return replace(self._shard_map, place=place)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return live parameter and buffer data by local name."""
        return named_tensors(self._chunks)

    def load_checkpoint(self, folder: Path) -> None:
        """Read this rank's slices of an HF checkpoint.

        Raises:
            LayoutError: When files are damaged or do not fit the model.
        """
        load_checkpoint(folder, self.layout.spec, self._shard_map, self.tensors())
        self.parameters_changed()

    def save_checkpoint(self, folder: Path) -> None:
        """Write an HF checkpoint, each rank its share. Collective over the role.

        Raises:
            ReshardError: On every rank, when `folder` exists or rank 0 cannot create it.
        """
        spec, rank = self.layout.spec, self._groups.rank
        maps = [megatron_shard_map(self.layout, _place(r)) for r in range(self._groups.sizes.world_size)]
        self._on_rank_0(lambda: create_checkpoint(folder, spec, self.layout.dtype, self._hf_folder))
        write_checkpoint(folder, spec, maps, rank, self.tensors())
        dist.barrier()
        self._on_rank_0(lambda: finish_checkpoint(folder))

    @property
    def state(self) -> TrainingState:
        """What a trained model must remember to go on.

        Raises:
            EngineError: The model is frozen.
        """
        if self._state is None:
            raise EngineError("a frozen model has no training state; give the engine an optimizer to train it")
        return self._state

    def parameters_changed(self) -> None:
        """Tell the optimizer that parameters were written from outside."""
        if self._optimizer:
            self._optimizer.reload_parameters()

    def logprobs(self, batch: SequenceBatch, temperature: float) -> LogprobResult | None:
        """Compute the log-prob of every token but the first of each row. Collective over the role.

        Args:
            temperature: Divides the logits, as in sampling.
        """
        self._check_has_vocabulary()
        positions = np.arange(batch.token_ids.shape[1])
        picked = (positions > 0) & (positions < batch.lengths[:, None])
        batches = self._split(batch, picked, {})
        routing, results = self._forward(batch, batches, temperature)
        if not self._groups.is_last_stage:
            return None
        logprobs = scatter_back(picked, batches, [result.logprobs for result in results], self._groups)
        entropies = scatter_back(picked, batches, [result.entropies for result in results], self._groups)
        if not self._groups.is_reporting:
            return None
        return LogprobResult(logprobs, entropies, routing)

    def update(
        self, batch: PolicyBatch, loss: PolicyLossConfig, temperature: float, want_logprobs: bool = False
    ) -> UpdateMetrics | None:
        """Take one optimizer step on the policy loss. Collective over the role.

        The loss is the sum, over the rows of all data-parallel ranks, of loss_weights times the token loss.

        Raises:
            EngineError: When the model is frozen, the batch lacks reference log-probs that the KL term needs, or
                loss_weights are set outside loss_mask.
        """
        rows = np.arange(len(batch.loss_mask), dtype=np.float32)
        values = {
            "old_logprobs": batch.old_logprobs,
            "advantages": batch.advantages,
            "loss_weights": batch.loss_weights,
            # The number of its row, at each token: losses over whole sequences group by it.
            "segments": np.broadcast_to(rows[:, None], batch.loss_mask.shape),
        }
        if batch.ref_logprobs is not None:
            values["ref_logprobs"] = batch.ref_logprobs
        elif loss.kl_coef:
            raise EngineError(f"kl_coef is {loss.kl_coef}, but the batch has no ref_logprobs; run the reference first")
        return self._update(
            batch.sequences, batch.loss_mask, values, policy_objective(loss), temperature, want_logprobs
        )

    def update_supervised(self, batch: SequenceBatch, loss_weights: NDArray[np.float32]) -> UpdateMetrics | None:
        """Take one optimizer step on the weighted negative log-likelihood. Collective over the role.

        Args:
            loss_weights: [num_samples, max_tokens] float32; 0 where the token is not trained on.

        Raises:
            EngineError: When the model is frozen.
        """
        return self._update(
            batch, loss_weights != 0, {"loss_weights": loss_weights}, supervised_objective(), 1.0, False
        )

    def _update(
        self,
        batch: SequenceBatch,
        picked: NDArray[np.bool_],
        values: Mapping[str, NDArray[np.float32]],
        objective: Objective,
        temperature: float,
        want_logprobs: bool,
    ) -> UpdateMetrics | None:
        self._check_has_vocabulary()
        batches = self._split(batch, picked, values)
        results, step, replayed, balance = self._step(batch, batches, temperature, objective)
        if not self._groups.is_last_stage:
            return None
        sums = self._total(results)
        pieces = [result.logprobs for result in results]
        logprobs = scatter_back(picked, batches, pieces, self._groups) if want_logprobs else None
        if not self._groups.is_reporting:
            return None
        return _metrics(sums, step, replayed, balance, logprobs)

    def _step(
        self, batch: SequenceBatch, batches: list[MicroBatch], temperature: float, objective: LossFunction
    ) -> tuple[list[MicroResult], StepResult, tuple[int, int], BalanceMetrics | None]:
        """Run forward and backward and step; return results, the step, choices of experts replayed and changed, and their balance."""
        if self._optimizer is None:
            raise EngineError("update was called on a frozen model; give the engine an optimizer to train it")
        self._optimizer.zero_grad()
        if self._replay:
            self._replay.start_replaying(_replayed_routing(batch), is_training=True)
        if self._balance:
            self._balance.start(batch.lengths)
        results = self._pipeline.forward_backward(batches, temperature, objective)
        replayed = self._finish_replay()
        step = self._optimizer.step()
        balance = self._balance.finish(has_stepped=not step.is_skipped) if self._balance else None
        return results, step, replayed, balance

    def _check_has_vocabulary(self) -> None:
        if self.layout.spec.value_head:
            raise EngineError(f"{self.layout.spec.family}: the model has a value head and gives no log-probs")

    def _forward(
        self, batch: SequenceBatch, batches: list[MicroBatch], temperature: float
    ) -> tuple[Routing | None, list[MicroResult]]:
        """Run forward, replaying the batch's routing or else recording one."""
        if self._replay is None:
            return None, self._pipeline.forward(batches, temperature)
        if batch.routing is not None:
            self._replay.start_replaying(batch.routing, is_training=False)
            results = self._pipeline.forward(batches, temperature)
            self._finish_replay()
            return None, results
        self._replay.start_recording()
        results = self._pipeline.forward(batches, temperature)
        routing = self._replay.recorded(*batch.token_ids.shape)
        self._replay.stop()
        return routing, results

    def _finish_replay(self) -> tuple[int, int]:
        """Check that routing was replayed; return choices replayed and changed over all ranks. Collective over the role."""
        if self._replay is None:
            return 0, 0
        failure: EngineError | None = None
        counts = (0, 0)
        try:
            counts = self._replay.check_replayed()
        except EngineError as e:
            failure = e  # the others learn of it before it is raised
        self._replay.stop()
        totals = torch.tensor([*counts, failure is not None], device=self._groups.device)
        dist.all_reduce(totals)
        num_replayed, num_changed, num_failed = totals.tolist()
        if failure:
            raise failure
        if num_failed:
            raise EngineError(f"router replay: {num_failed} other ranks could not replay; their errors say why")
        if not num_replayed:
            raise EngineError(
                "router replay: not one choice of experts was replayed; the batch's routing is free everywhere"
            )
        return num_replayed, num_changed

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 and let every rank know how it ended."""
        failure: list[str | None] = [None]
        if self._groups.rank == 0:
            try:
                action()
            except (HybridRLError, OSError) as e:
                failure = [str(e)]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise ReshardError(failure[0])

    def _split(
        self,
        batch: SequenceBatch,
        picked: NDArray[np.bool_],
        values: Mapping[str, NDArray[np.float32]],
        lead: int = 1,
    ) -> list[MicroBatch]:
        if "loss_weights" in values and (outside := (values["loss_weights"] != 0) & ~picked).any():
            row, token = np.argwhere(outside)[0]
            raise EngineError(f"loss_weights of token {token} in row {row} is not 0, but loss_mask leaves it out")
        return micro_batches.split(batch, picked, values, self._groups, self._packing, self._cost, lead)

    def _total(self, results: list[MicroResult]) -> list[float]:
        """Add up the sums of all micro-batches of all data-parallel and context-parallel ranks. Collective over the last stage."""
        total = torch.stack([result.sums for result in results if result.sums is not None]).sum(0)
        if self._groups.sizes.dp * self._groups.sizes.cp > 1:
            dist.all_reduce(total, group=self._groups.collection.dp_cp)
        values: list[float] = total.tolist()
        return values


def _place(rank: int) -> Place:
    return Place("megatron", rank, "file", f"rank {rank}")


def _packing_rules(config: MicroBatchConfig, parallel: ParallelConfig) -> PackingRules:
    return PackingRules(
        max_tokens=config.tokens,
        is_packed=config.is_packed,
        sequence_multiple=sequence_alignment(parallel),
        total_multiple=alignment(parallel),
        # The interleaved schedule runs micro-batches in groups of pp.
        count_multiple=parallel.pp_size if parallel.vpp_size > 1 else 1,
    )


def _moe_layers(spec: ModelSpec) -> list[int]:
    """Return the decoder layers with experts.

    Raises:
        EngineError: There are none.
    """
    if layers := spec.moe_layers:
        return list(layers)
    raise EngineError(f"{spec.family}: router replay needs a mixture of experts; turn actor.router_replay off")


def _replayed_routing(batch: SequenceBatch) -> Routing:
    if batch.routing is None:
        raise EngineError("router replay: the batch of an update has no routing; record it in a pass before")
    return batch.routing


def _metrics(
    sums: list[float],
    step: StepResult,
    replayed: tuple[int, int],
    balance: BalanceMetrics | None,
    logprobs: NDArray[np.float32] | None,
) -> UpdateMetrics:
    num_tokens = max(1.0, sums[Sum.TOKENS])
    return UpdateMetrics(
        loss=sums[Sum.LOSS],
        grad_norm=step.grad_norm,
        entropy=sums[Sum.ENTROPY] / num_tokens,
        lr=step.lr,
        approx_kl=sums[Sum.KL] / num_tokens,
        clip_fraction=sums[Sum.CLIPPED] / num_tokens,
        ratio_mean=sums[Sum.RATIO] / num_tokens,
        ref_kl=sums[Sum.REF_KL] / num_tokens,
        num_tokens=int(sums[Sum.TOKENS]),
        is_skipped=step.is_skipped,
        num_skipped=step.num_skipped,
        num_replayed=replayed[0],
        num_replay_changed=replayed[1],
        balance=balance,
        logprobs=logprobs,
    )
