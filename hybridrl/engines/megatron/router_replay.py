"""Router replay: the routers of one engine record which experts they choose, or choose those that they are told.

Two forward passes of the same weights can route a token to different experts when two scores are nearly equal, and then the
policy that is trained is not the one that sampled. Replay removes that: the update takes the experts of the old-log-prob
pass (R2) or of the sampler (R3), while router weights, and so gradients, are still computed from the current scores.

    scores of a token -> top-k experts -> weights of those experts
                         ^ recorded here, or replaced by recorded ones

Megatron-core's routers ask an object of their own for the top-k (``router_replay.py`` there keeps all of a process in one
global list). Here the objects belong to the engine, so that several models of a process do not meet.

Which micro-batch a router works on is set before each forward pass of a chunk. Activation recomputation runs a router again
during the backward pass, when other micro-batches have passed in between: it then takes up its micro-batches in the order in
which it met them first, which is the order of every schedule of Megatron-core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.router import TopKRouter

from hybridrl.errors import EngineError

FREE = -1
"""In place of an expert: the router chooses by itself."""

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class ReplayCounts:
    """What one call replayed, over the routers and tokens of a rank.

    Attributes:
        replayed: Choices (a token in a layer) that were replayed.
        changed: Those of them that the router would have made differently.
    """

    replayed: int = 0
    changed: int = 0


class RouterReplay:
    """The routers of one rank.

    Args:
        chunks: Model chunks.
        moe_layers: Decoder layers with experts, of the whole model; a position in this list is a position in routing arrays.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], moe_layers: Sequence[int]) -> None:
        self.num_layers = len(moe_layers)
        self.counts = ReplayCounts()
        self._layers: list[list[_LayerReplay]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            replays = [_LayerReplay(moe_layers.index(router.layer_number - 1), self.counts) for router in routers]
            for router, replay in zip(routers, replays, strict=True):
                router.router_replay = replay
            self._layers.append(replays)

    @property
    def held_layers(self) -> list[int]:
        """Positions of this rank's layers in routing arrays."""
        return [replay.layer for replays in self._layers for replay in replays]

    def begin(self, *, is_training: bool) -> None:
        """Forget what an earlier call left behind.

        Args:
            is_training: Whether a backward pass follows.
        """
        self.counts.replayed = self.counts.changed = 0
        for replay in self._all():
            replay.begin(is_training)

    def record(self, chunk: int) -> None:
        """Let the routers of a chunk record the next micro-batch."""
        for replay in self._layers[chunk]:
            replay.targets, replay.is_recording = None, True

    def replay(self, chunk: int, routing: torch.Tensor) -> None:
        """Tell the routers of a chunk what to choose for the next micro-batch.

        Args:
            routing: [local_tokens, num_moe_layers, top_k] integer experts; rows with :data:`FREE` are left to the router.
        """
        for replay in self._layers[chunk]:
            replay.targets, replay.is_recording = routing[:, replay.layer].long(), False

    def recorded(self, num_micro_batches: int) -> list[torch.Tensor]:
        """Return [local_tokens, held layers, top_k] int64 per micro-batch, in order.

        Raises:
            EngineError: A router did not record every micro-batch.
        """
        for replay in self._all():
            if len(replay.recorded) != num_micro_batches:
                raise EngineError(
                    f"router replay: the router of MoE layer {replay.layer} recorded {len(replay.recorded)} micro-batches, expected "
                    f"{num_micro_batches}; its top-k does not pass through the replay"
                )
        return [
            torch.stack([replay.recorded[index] for replay in self._all()], dim=1) for index in range(num_micro_batches)
        ]

    def check_replayed(self, num_micro_batches: int) -> None:
        """Make sure that the last call did replay.

        Raises:
            EngineError: A router did not see every micro-batch, or kept some for a recomputation that never came.
        """
        for replay in self._all():
            if replay.num_replayed != num_micro_batches or replay.pending:
                raise EngineError(
                    f"router replay: the router of MoE layer {replay.layer} replayed {replay.num_replayed} of {num_micro_batches} "
                    f"micro-batches, {len(replay.pending)} of them left for recomputation; its top-k does not pass through the replay"
                )

    def _all(self) -> list[_LayerReplay]:
        return [replay for replays in self._layers for replay in replays]


@dataclass(slots=True)
class _LayerReplay:
    """Stands where a router of Megatron-core expects its ``RouterReplay``."""

    layer: int
    counts: ReplayCounts
    layer_number: int | None = None  # set by the router of megatron-core 0.19
    targets: torch.Tensor | None = None
    is_recording: bool = False
    is_training: bool = False
    recorded: list[torch.Tensor] = field(default_factory=list)
    pending: deque[torch.Tensor] = field(default_factory=deque)
    num_replayed: int = 0

    def begin(self, is_training: bool) -> None:
        self.targets, self.is_recording, self.is_training = None, False, is_training
        self.recorded.clear()
        self.pending.clear()
        self.num_replayed = 0

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([tokens, topk] scores, [tokens, topk] experts); the name and the arguments are Megatron-core's."""
        values, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.is_recording:
            self.recorded.append(own.detach())
        targets, is_repeated = self._next_targets()
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

    def _next_targets(self) -> tuple[torch.Tensor | None, bool]:
        """Return what to choose, and whether this forward pass repeats an earlier one for the backward pass.

        Recomputed layers run without gradients first and with them when they are repeated.
        """
        if torch.is_grad_enabled() and self.pending:
            return self.pending.popleft(), True
        if self.targets is not None and self.is_training and not torch.is_grad_enabled():
            self.pending.append(self.targets)
        return self.targets, False

    def _count(self, own: torch.Tensor, chosen: torch.Tensor, targets: torch.Tensor) -> None:
        is_replayed = (targets != FREE).all(-1)
        is_changed = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.num_replayed += 1
        self.counts.replayed += int(is_replayed.sum())
        self.counts.changed += int((is_changed & is_replayed).sum())
