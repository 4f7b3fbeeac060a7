"""A simulated world: all ranks of both sides in one process, arrays instead of memories.

A plan is carried out as every rank would: its moves are compiled into the kernels' segment tables, and the kernels copy.
What should come out is cut from the canonical tensors by numpy, without the planner.
"""

import numpy as np

from hybridrl.reshard import ops
from hybridrl.reshard.segments import Copy, copy_tables


def slices(box):
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def cut_local(shard_map, canonical):
    """Return a rank's tensors, cut from the canonical ones; NaN is padding."""
    local = {name: np.full(t.shape, np.nan, np.float32) for name, t in shard_map.tensors.items()}
    for shard in shard_map.shards:
        flat = local[shard.local].reshape(-1)[shard.offset :]
        strides = [stride * flat.itemsize for stride in shard.strides]
        np.lib.stride_tricks.as_strided(flat, shard.box.shape, strides)[...] = canonical[shard.tensor][
            slices(shard.box)
        ]
    return local


def cut_all(maps, canonical):
    """Return the tensors of all ranks; equal maps share arrays, which are only read."""
    known = {}
    for shard_map in maps:
        key = (id(shard_map.shards), id(shard_map.tensors))  # ranks that hold only padding have equal shards
        if key not in known:
            known[key] = cut_local(shard_map, canonical)
    return [known[id(shard_map.shards), id(shard_map.tensors)] for shard_map in maps]


def carry_out(plan, have, destinations):
    """Run a plan with the kernels, what destinations pass on included; NaN marks what was never written."""
    got = [{name: np.full(t.shape, np.nan, np.float32) for name, t in m.tensors.items()} for m in destinations]
    _copy(list(plan.moves), have, got)
    _copy(list(plan.relays), got, got)
    return got


def _copy(moves, have, got):
    read = {key: i for i, key in enumerate(dict.fromkeys((m.source, m.read.local) for m in moves))}
    write = {key: i for i, key in enumerate(dict.fromkeys((m.destination, m.write.local) for m in moves))}
    copies = [
        (
            m.tensor,
            Copy(m.box.shape, read[m.source, m.read.local], m.read, write[m.destination, m.write.local], m.write),
        )
        for m in moves
    ]
    sources = ops.buffer_table([have[rank][name] for rank, name in read])
    targets = ops.buffer_table([got[rank][name] for rank, name in write])
    for cast, table in copy_tables(copies):
        ops.segmented_copy(table, sources, targets, cast=cast, num_threads=1)


def brute_force_bytes(sources, destinations, canonical, itemsize=4):
    """Mark, element by element, what each destination wants and its device does not hold; return bytes per destination."""
    known = {}
    bounds = []
    for destination in destinations:
        device = (destination.place.node, destination.place.device)
        local = [m for m in sources if (m.place.node, m.place.device) == device]
        key = (id(destination.shards), *(id(m.shards) for m in local))
        if key not in known:
            known[key] = itemsize * _count_missing(destination, local, canonical)
        bounds.append(known[key])
    return bounds


def _count_missing(destination, local, canonical):
    wanted = {name: np.zeros(canonical[name].shape, bool) for name in destination.canonical}
    for shard in destination.shards:
        wanted[shard.tensor][slices(shard.box)] = True
    for shard_map in local:
        for shard in shard_map.shards:
            if shard.tensor in wanted:
                wanted[shard.tensor][slices(shard.box)] = False
    return sum(int(mask.sum()) for mask in wanted.values())


def count_per_node(sources, destinations, canonical, itemsize=4):
    """Mark what the destinations of each node want and no source of the node holds; return bytes per node."""
    totals = {}
    for node in {m.place.node for m in destinations}:
        wanted = {name: np.zeros(values.shape, bool) for name, values in canonical.items()}
        for maps, mark in ((destinations, True), (sources, False)):
            for shard_map in maps:
                if shard_map.place.node == node:
                    for shard in shard_map.shards:
                        wanted[shard.tensor][slices(shard.box)] = mark
        totals[node] = itemsize * sum(int(mask.sum()) for mask in wanted.values())
    return totals
