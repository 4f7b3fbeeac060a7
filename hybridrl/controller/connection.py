"""Plans a weight sync and connects both roles to the plan, as often as replicas come or go.

    shard maps -> plan, cut into parts -> every rank gets its part and closes its old transport -> all connect at once

The controller keeps places, for its reports, and the bytes of the plan. Training ranks stay as they are: only their transports change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridrl.config.choices import Platform, TransportName
from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.interfaces import WeightDestination, WeightSource
from hybridrl.errors import EngineError, ReshardError
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.reshard.parts import cut_plan
from hybridrl.reshard.plan import Ends
from hybridrl.reshard.planner import Planner, lower_bound_bytes
from hybridrl.reshard.transport_choice import choose_transport
from hybridrl.reshard.transports import Rendezvous
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.future import wait_for_both

_ONE_NODE = (TransportName.SHM, TransportName.CUDA_IPC)


@dataclass(frozen=True)
class Connection(Ends):
    """What the controller keeps of a plan that both roles are connected to.

    Attributes:
        lower_bound_bytes: The fewest bytes that any plan could have put on the wire, from the shard maps alone.
    """

    lower_bound_bytes: int


@dataclass(frozen=True, slots=True)
class Connector:
    """Connects the actor with whatever replicas there are.

    Attributes:
        actor_maps: One per training rank, in rank order.
        session: Unique per run; names shared memory and store keys.
    """

    actor: WeightSource
    rollout: WeightDestination
    actor_maps: Sequence[ShardMap]
    config: WeightSyncConfig
    platform: Platform
    session: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def connect(self, rollout_maps: Sequence[ShardMap]) -> Connection:
        """Plan, and connect every rank; ranks that were connected before close their old transports.

        Args:
            rollout_maps: One per rollout worker, in the order in which the replicas answer.

        Raises:
            ReshardError: No plan exists; names the parameter and the range.
            EngineError: The transport that was asked for cannot reach, or a rank could not connect.
        """
        config = self.config
        sources, destinations = ([shard_map.place for shard_map in maps] for maps in (self.actor_maps, rollout_maps))
        kind = transport_kind(sources, destinations, config.transport, self.platform)
        planner = Planner(
            self.actor_maps,
            rollout_maps,
            chunk_bytes=config.chunk_mib << 20,
            is_staggered=self.rollout.num_replicas > 1,
            is_shared=kind == TransportName.MIXED.value,  # the one that reaches other nodes and can relay inside them
        )
        parts = cut_plan(planner)
        bound = lower_bound_bytes(self.actor_maps, rollout_maps)
        if parts.wire_bytes != bound:
            raise ReshardError(
                f"the plan puts {parts.wire_bytes} bytes on the wire, but {bound} are enough; this is a fault of the planner"
            )
        host, port = self.actor.rendezvous()
        session = f"{self.session}-{next(self.numbers)}"
        rendezvous = Rendezvous(kind, session, host, port, inner_s(config.timeout_s))
        wait_for_both(
            self.actor.connect_sync(rendezvous, parts.of_source, verify=config.verify, timeout_s=config.timeout_s),
            self.rollout.connect_sync(rendezvous, parts.of_destination, timeout_s=config.timeout_s),
        )
        return Connection(parts.sources, parts.destinations, bound)


def transport_kind(
    sources: Sequence[Place], destinations: Sequence[Place], wanted: TransportName, platform: Platform
) -> str:
    """Return the transport of a connection.

    Raises:
        EngineError: The wanted one stays inside a node, and the ranks are on several.
    """
    nodes = {place.node for place in (*sources, *destinations)}
    if wanted in _ONE_NODE and len(nodes) > 1:
        raise EngineError(
            f"weight_sync.transport: {wanted.value}, but actor and rollout run on {len(nodes)} nodes, which share no memory; "
            "use auto, or ask for no more than one node has"
        )
    if wanted is not TransportName.AUTO:
        return wanted.value
    return choose_transport(sources, destinations, is_cuda=platform is Platform.CUDA)
