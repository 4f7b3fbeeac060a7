"""All ranks of both sides in one process, one thread per rank, over the real transports."""

import socket
import uuid
from concurrent.futures import ThreadPoolExecutor

import torch

from hybridrl.layout.box import DType
from hybridrl.reshard.executor import Receiver, Sender, TensorSink
from hybridrl.reshard.transports import Rendezvous, open_transport
from tests.unit.layout.models import fill_local

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}


def filled_tensors(shard_map, canonical):
    """Return a rank's tensors holding its slices of the canonical values; padding holds NaN."""
    values = fill_local(shard_map, canonical)
    return {name: torch.from_numpy(values[name]).to(TORCH[t.dtype]) for name, t in shard_map.tensors.items()}


def empty_tensors(shard_map):
    """Return a rank's tensors, all NaN."""
    return {name: torch.full(t.shape, float("nan"), dtype=TORCH[t.dtype]) for name, t in shard_map.tensors.items()}


def rendezvous(kind, timeout_s):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Rendezvous(kind, uuid.uuid4().hex[:12], "127.0.0.1", port, timeout_s)


def transfer(
    plan,
    sources,
    destinations,
    kind,
    *,
    versions=(1,),
    wrap=lambda transport, **who: transport,
    deadline_s=10.0,
    timeout_s=10.0,
):
    """Run a plan once per version; `wrap` may replace a rank's transport. Returns reports or exceptions per rank and version."""
    meet = rendezvous(kind, timeout_s)

    def source_rank(index):
        transport = wrap(open_transport(meet, plan, source=index), source=index)
        try:
            sender = Sender(plan, index, transport)
            return [sender.run(sources[index], version, deadline_s) for version in versions]
        finally:
            transport.close()

    def destination_rank(index):
        transport = wrap(open_transport(meet, plan, destination=index), destination=index)
        try:
            receiver = Receiver(plan, index, transport)
            return [receiver.run(TensorSink(destinations[index]), version, deadline_s) for version in versions]
        finally:
            transport.close()

    with ThreadPoolExecutor(len(plan.sources) + len(plan.destinations)) as pool:
        sent = [pool.submit(source_rank, i) for i in range(len(plan.sources))]
        received = [pool.submit(destination_rank, i) for i in range(len(plan.destinations))]
        outcomes = [[future.exception() or future.result() for future in side] for side in (sent, received)]
    return outcomes
