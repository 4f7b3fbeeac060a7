"""A plan cut into what each rank needs: its own moves, and the sizes of the messages that lie beside its own.

The controller keeps no move: places for its reports, and the bytes that the whole plan puts on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridrl.reshard.moves import trim
from hybridrl.reshard.plan import Ends, Plan
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.sizes import MessageSizes


@dataclass(frozen=True)
class PlanParts(Ends):
    """A plan, rank by rank; executing all parts together is executing the plan.

    Attributes:
        of_source: What each source serves.
        of_destination: What each destination receives and passes on.
        wire_bytes: Payload bytes of the whole plan that leave the memory of a device.
    """

    of_source: tuple[Plan, ...]
    of_destination: tuple[Plan, ...]
    wire_bytes: int


def cut_plan(planner: Planner) -> PlanParts:
    """Plan for every rank of both sides.

    Worked example: sources a and b each send 100 bytes in chunk 0 to destination d. The part of b has its own move and the two
    sizes, from which it knows that its message lies behind that of a in d's inbox.
    """
    sources, destinations = planner.places
    received = tuple(_trimmed(planner.for_destination(destination)) for destination in range(len(destinations)))
    sizes = MessageSizes.concatenate(
        [MessageSizes.of(part.sent).to(np.array([to])) for to, part in enumerate(received)]
    )
    served = (_trimmed(planner.for_source(source)) for source in range(len(sources)))
    return PlanParts(
        sources,
        destinations,
        tuple(replace(part, sizes=sizes.to(part.moves.destination)) for part in served),
        tuple(replace(part, sizes=sizes.to(part.sent.destination)) for part in received),
        sum(part.wire_bytes_to(to) for to, part in enumerate(received)),
    )


def _trimmed(part: Plan) -> Plan:
    moves, relays = trim(part.moves, part.relays)
    return replace(part, moves=moves, relays=relays)
