"""Router replay: the routers of one engine record which experts they choose, or choose those that they are told.

Two forward passes of the same weights can route a token to different experts when two scores are nearly equal, and then the
policy that is trained is not the one that sampled. Replay removes that: the update takes the experts of the old-log-prob
pass (R2) or of the sampler (R3), while router weights, and so gradients, are still computed from the current scores.

    scores of a token -> top-k experts -> weights of those experts
                         ^ recorded here, or replaced by recorded ones

Megatron-core's routers ask an object of their own for the top-k (``router_replay.py`` there keeps all of a process in one
global list). Here the objects belong to the engine, so that several models of a process do not meet.

Which micro-batch a router works on is set before each forward pass of a chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray

from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.engines.megatron.recomputation import MicroBatchCursor
from hybridrl.errors import EngineError

FREE = -1
"""In place of an expert: the router chooses by itself."""

Routing = NDArray[np.int16]
TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _Mode(enum.Enum):
    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


class RouterReplay:
    """The routers of one rank.

    Args:
        chunks: Model chunks, in the order of the schedule.
        moe_layers: Decoder layers with experts, of the whole model; a position in this list is a position in routing arrays.
        is_sequence_parallel: Whether each tp rank routes a share of the tokens.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        moe_layers: Sequence[int],
        groups: ProcessGroups,
        *,
        is_sequence_parallel: bool,
    ) -> None:
        self._num_layers = len(moe_layers)
        self._groups = groups
        self._num_slices = groups.sizes.tp if is_sequence_parallel else 1
        self._mode = _Mode.OFF
        self._routing = torch.zeros(0)
        self._places: list[torch.Tensor] = []
        self._layers: list[list[_LayerReplay]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            replays = [_LayerReplay(moe_layers.index(router.layer_number - 1)) for router in routers]
            for router, replay in zip(routers, replays, strict=True):
                router.router_replay = replay
            self._layers.append(replays)

    def start_recording(self) -> None:
        """Record what the next forward pass chooses."""
        self._start(_Mode.RECORD, is_training=False)

    def start_replaying(self, routing: Routing, *, is_training: bool) -> None:
        """Let the next pass choose what is recorded.

        Args:
            routing: [num_samples, max_tokens, num_moe_layers, top_k]; tokens with :data:`FREE` are left to the router.
            is_training: Whether a backward pass belongs to it.

        Raises:
            EngineError: The array does not fit the model.
        """
        if routing.shape[2] != self._num_layers:
            raise EngineError(
                f"router replay: got the experts of {routing.shape[2]} layers, expected those of {self._num_layers} MoE layers"
            )
        self._start(_Mode.REPLAY, is_training=is_training)
        flat = torch.from_numpy(routing.reshape(-1, *routing.shape[2:]))
        nobody = torch.full((1, *flat.shape[1:]), FREE, dtype=flat.dtype)
        self._routing = torch.cat([flat, nobody]).to(self._groups.device)

    def stop(self) -> None:
        """Let the routers choose by themselves again."""
        self._start(_Mode.OFF, is_training=False)

    def enter(self, chunk: int, places: torch.Tensor) -> None:
        """Prepare the routers of a chunk for its next micro-batch.

        Args:
            places: [tokens] where each of the rank's tokens stands in the flattened batch, -1 for none.
        """
        if self._mode is _Mode.OFF:
            return
        if self._num_slices > 1:
            places = places.chunk(self._num_slices)[self._groups.at.tp]
        if chunk == 0:
            self._places.append(places)
        if self._mode is _Mode.REPLAY:
            for replay in self._layers[chunk]:
                replay.cursor.enter(self._routing[places, replay.layer].long())

    def recorded(self, num_samples: int, max_tokens: int) -> Routing:
        """Return what all ranks recorded: [num_samples, max_tokens, num_moe_layers, top_k]. Collective over tp, cp and pp ranks.

        Tokens that no router saw are :data:`FREE`.

        Raises:
            EngineError: A router did not record every micro-batch.
        """
        self._check("recorded", [len(replay.recorded) for replay in self._all()])
        groups = self._groups
        held = max((replay.recorded[0].size(1) for replay in self._all()), default=0)
        top_k = torch.tensor(held, device=groups.device)
        if groups.sizes.pp > 1:  # a stage may hold no experts
            dist.all_reduce(top_k, op=dist.ReduceOp.MAX, group=groups.collection.pp)
        shape = (num_samples * max_tokens + 1, self._num_layers, int(top_k))
        found = torch.zeros(shape, dtype=torch.int32, device=groups.device)  # experts from 1, so that 0 is nobody's
        for replay in self._all():
            for places, experts in zip(self._places, replay.recorded, strict=True):
                found[places, replay.layer] = experts.int() + 1
        found = found[:-1].contiguous()
        for size, group in self._reductions():
            if size > 1:
                dist.all_reduce(found, group=group)
        return (found.cpu().numpy() - 1).astype(np.int16).reshape(num_samples, max_tokens, self._num_layers, -1)

    def check_replayed(self) -> tuple[int, int]:
        """Return how many choices (a token in a layer) were replayed on this rank, and how many of them changed what the router wanted.

        Raises:
            EngineError: A router did not see every micro-batch, or kept some for a recomputation that never came.
        """
        self._check("replayed", [replay.num_passes for replay in self._all()])
        self._check("recomputed", [len(self._places) - replay.cursor.num_pending for replay in self._all()])
        return sum(replay.num_replayed for replay in self._all()), sum(replay.num_changed for replay in self._all())

    def _start(self, mode: _Mode, *, is_training: bool) -> None:
        self._mode = mode
        self._routing = torch.zeros(0)
        self._places.clear()
        for replay in self._all():
            replay.start(is_recording=mode is _Mode.RECORD, is_training=is_training)

    def _check(self, what: str, counts: Sequence[int]) -> None:
        for replay, count in zip(self._all(), counts, strict=True):
            if count != len(self._places):
                raise EngineError(
                    f"router replay: MoE layer {replay.layer} {what} {count} of {len(self._places)} micro-batches; its router does not "
                    "ask the replay for its top-k, as with fused routing"
                )

    def _reductions(self) -> list[tuple[int, dist.ProcessGroup]]:
        sizes, collection = self._groups.sizes, self._groups.collection
        return [(self._num_slices, collection.tp), (sizes.cp, collection.cp), (sizes.pp, collection.pp)]

    def _all(self) -> list[_LayerReplay]:
        return [replay for replays in self._layers for replay in replays]


@dataclass(slots=True)
class _LayerReplay:
    """Stands where a router of Megatron-core expects its ``RouterReplay``.

    Attributes:
        cursor: [tokens, top_k] experts of the micro-batch at hand.
        recorded: [tokens, top_k] of each micro-batch.
        num_passes: Micro-batches that were replayed.
        num_replayed: Tokens that were.
        num_changed: Those of them that the router would have sent elsewhere.
    """

    layer: int
    layer_number: int | None = None  # set by the router of megatron-core 0.19
    cursor: MicroBatchCursor[torch.Tensor] = field(default_factory=MicroBatchCursor)
    is_recording: bool = False
    recorded: list[torch.Tensor] = field(default_factory=list)
    num_passes: int = 0
    num_replayed: int = 0
    num_changed: int = 0

    def start(self, *, is_recording: bool, is_training: bool) -> None:
        self.cursor.start(is_training=is_training)
        self.is_recording = is_recording
        self.recorded.clear()
        self.num_passes = self.num_replayed = self.num_changed = 0

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([tokens, topk] scores, [tokens, topk] experts); the name and the arguments are Megatron-core's."""
        values, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.is_recording:
            self.recorded.append(own.detach())
        targets, is_repeated = self.cursor.take()
        if targets is None:
            return values, own
        if targets.shape != own.shape:
            raise EngineError(
                f"router replay: MoE layer {self.layer} routes {tuple(own.shape)} (tokens, experts), but was told {tuple(targets.shape)}"
            )
        chosen = torch.where(targets == FREE, own, targets)
        if not is_repeated:
            self._count(own, chosen, targets)
        return scores.gather(1, chosen), chosen

    def _count(self, own: torch.Tensor, chosen: torch.Tensor, targets: torch.Tensor) -> None:
        is_replayed = (targets != FREE).all(-1)
        is_changed = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.num_passes += 1
        self.num_replayed += int(is_replayed.sum())
        self.num_changed += int((is_changed & is_replayed).sum())
