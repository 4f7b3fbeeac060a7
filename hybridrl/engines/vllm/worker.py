"""What HybridRL adds to a vLLM worker process: its shard map, and receiving weights.

vLLM mixes :class:`WorkerExtension` into its worker class (`worker_extension_cls`); the engine calls the methods on all workers of a
replica at once. Every method takes and returns bytes (see ``messages.py``) and turns an error into a reply, because a worker that
raises would leave the others of its group without an answer.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from vllm.platforms import current_platform

from hybridrl.data.generation import Routing
from hybridrl.engines.profiler import Profiler
from hybridrl.engines.vllm.install import ModuleSink
from hybridrl.engines.vllm.learn import LearnedLayout, learn_layout
from hybridrl.engines.vllm.messages import Reply, decode, encode
from hybridrl.engines.vllm.orphans import end_with
from hybridrl.engines.vllm.requests import ConnectRequest, LearnRequest, ProfileRequest, ReceiveRequest
from hybridrl.engines.vllm.routing import RoutingRecorder
from hybridrl.errors import EngineError, PeerLostError
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.reshard.executor import Receiver, TransferReport
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Transport, open_transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Connection:
    """A joined transfer group; receivers are compiled once, with and without verification."""

    plan: Plan
    destination: int
    transport: Transport
    receivers: dict[bool, Receiver] = field(default_factory=dict)

    def receiver(self, verify: bool) -> Receiver:
        if verify not in self.receivers:
            self.receivers[verify] = Receiver(self.plan, self.destination, self.transport, verify=verify)
        return self.receivers[verify]


def _answered(method: Callable[[Any, Any], object]) -> Callable[[Any, bytes], bytes]:
    """Turn ``method(self, request) -> value`` into ``method(self, bytes) -> bytes`` that never raises."""

    @functools.wraps(method)
    def call(self: Any, payload: bytes) -> bytes:
        try:
            return encode(Reply(self.rank, method(self, decode(payload))))
        except Exception as e:  # noqa: BLE001 - a process boundary: the error goes to the caller as a reply
            _log.exception("rollout worker %d: %s failed", self.rank, method.__name__)
            text, is_peer_lost = f"{type(e).__name__}: {e}", isinstance(e, PeerLostError)
            return encode(Reply(self.rank, None, text, is_peer_lost, traceback.format_exc(), time.monotonic()))

    return call


class WorkerExtension:
    """Methods of every rollout worker; `rank`, `model_runner`, `model_config` and `parallel_config` are vLLM's."""

    rank: int
    model_runner: Any
    model_config: Any
    parallel_config: Any
    _hybridrl_layout: LearnedLayout | None = None
    _hybridrl_connection: _Connection | None = None
    _hybridrl_routing: RoutingRecorder | None = None
    _hybridrl_profiler: Profiler | None = None

    @_answered
    def hybridrl_end_with(self, owner_pid: int) -> None:
        """End this replica's processes when its owner is gone."""
        end_with(owner_pid)

    @_answered
    def hybridrl_show(self, identity: Identity) -> None:
        """Show this process's heartbeat, which a step of the sampler advances."""
        is_alone = self.parallel_config.tensor_parallel_size == 1
        HEARTBEAT.show(identity if is_alone else replace(identity, part=f"{identity.part} {self.rank}"))
        self.model_runner.execute_model = _counted(self.model_runner.execute_model)

    @_answered
    def hybridrl_record_routing(self, request: None) -> None:
        """Record from now on which experts each token chooses; one worker is enough, since all choose the same."""
        if self.rank == 0:
            self._hybridrl_routing = RoutingRecorder(self.model_runner)

    @_answered
    def hybridrl_take_routing(self, request_id: str) -> Routing | None:
        """Return the experts of a finished request; None on workers that do not record."""
        return self._hybridrl_routing.take(request_id) if self._hybridrl_routing else None

    @_answered
    def hybridrl_shard_map(self, request: LearnRequest) -> ShardMap:
        """Learn the layout of this worker's weights and return it."""
        rank = request.first_rank + self.rank
        place = Place("rollout", rank, request.node, _device_name(rank))
        self._hybridrl_layout = learn_layout(self._hybridrl_model(), request.canonical, self.model_config.dtype, place)
        return self._hybridrl_layout.shard_map

    @_answered
    def hybridrl_connect(self, request: ConnectRequest) -> None:
        """Open the transport; every rank of both sides calls this at the same time."""
        self._hybridrl_close()
        place = self._hybridrl_learned().shard_map.place
        plan = request.parts[self.rank]
        if place not in plan.destinations:
            raise EngineError(
                f"{place} is no destination of the plan; expected one of {list(map(str, plan.destinations))}"
            )
        destination = plan.destinations.index(place)
        transport = open_transport(request.rendezvous, plan, destination=destination)
        self._hybridrl_connection = _Connection(plan, destination, transport)

    @_answered
    def hybridrl_receive(self, request: ReceiveRequest) -> TransferReport:
        """Receive and install all weights; on an error the model is a mixture until a later receive succeeds."""
        connection = self._hybridrl_connection
        if connection is None:
            raise EngineError("receive before connect; connect the replica to the plan's transport first")
        if self._hybridrl_routing:
            self._hybridrl_routing.clear()
        sink = ModuleSink(self._hybridrl_model(), self._hybridrl_learned(), self.model_config.dtype)
        try:
            with torch.no_grad():
                report = connection.receiver(request.verify).run(sink, request.version, request.deadline_s)
                sink.finish()
        finally:
            sink.abort()
        return report

    @_answered
    def hybridrl_disconnect(self, request: None) -> None:
        """Close the transport, if one is open."""
        self._hybridrl_close()

    @_answered
    def hybridrl_begin_profile(self, request: ProfileRequest) -> None:
        """Profile whatever this worker does from now on, if its rank is profiled."""
        self._hybridrl_profiler = Profiler(request.launch, request.first_rank + self.rank)
        self._hybridrl_profiler.begin(request.step)
        self._hybridrl_profiler.enter("rollout", "step")

    @_answered
    def hybridrl_end_profile(self, request: None) -> None:
        """End the profile, if there is one."""
        if self._hybridrl_profiler is not None:
            self._hybridrl_profiler.end()

    def _hybridrl_model(self) -> nn.Module:
        model: nn.Module = self.model_runner.get_model()
        return model

    def _hybridrl_learned(self) -> LearnedLayout:
        if self._hybridrl_layout is None:
            raise EngineError("connect before the layout was learned; ask for the shard map first")
        return self._hybridrl_layout

    def _hybridrl_close(self) -> None:
        if self._hybridrl_connection is not None:
            self._hybridrl_connection.transport.close()
            self._hybridrl_connection = None


def _counted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(*arguments: Any, **named: Any) -> Any:
        HEARTBEAT.advance()
        return step(*arguments, **named)

    return call


def _device_name(rank: int) -> str:
    """Name the device whose memory holds this worker's weights, the same in every process that uses that device."""
    if current_platform.is_cpu():
        return f"rollout-{rank}"
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
