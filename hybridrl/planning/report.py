"""A prediction as tables for people, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.table import Table

from hybridrl.layout.parallel import parallel_sizes
from hybridrl.planning.advice import fullest
from hybridrl.planning.memory import DeviceMemory, Phase, RoleMemory
from hybridrl.planning.pools import run_pools
from hybridrl.planning.run_plan import RunPlan
from hybridrl.planning.timing import Seconds
from hybridrl.planning.units import binary, decimal
from hybridrl.reshard.topology import LinkClass

_FROM = {
    LinkClass.DEVICE: "from its own device",
    LinkClass.NODE: "from its node",
    LinkClass.NETWORK: "from other nodes",
}


def plan_tables(plan: RunPlan) -> Iterator[Table]:
    """Yield the tables of a prediction."""
    yield _overview(plan)
    yield _stage_table(plan)
    yield _device_table(plan)
    yield _sync_table(plan)
    yield _timing_table(plan)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def _overview(plan: RunPlan) -> Table:
    parallel, rollout, work = plan.config.actor.parallel, plan.config.rollout, plan.work
    sizes = parallel_sizes(parallel)
    table = _table(f"{plan.config.name} on {plan.cluster.name}", "", "")
    table.add_row("model", f"{plan.num_parameters:,} parameters, {plan.num_active_parameters:,} per token")
    table.add_row("devices", f"{plan.num_devices} on {plan.num_nodes} node(s): {', '.join(_pools(plan))}")
    degrees = f"tp {sizes.tp} x pp {sizes.pp} x cp {sizes.cp} x dp {sizes.dp}, experts ep {sizes.ep} x etp {sizes.etp}"
    table.add_row("actor", f"{sizes.world_size} ranks: {degrees} x edp {sizes.edp}, vpp {parallel.vpp_size}")
    table.add_row("rollout", f"{rollout.num_replicas} replicas of {rollout.tp_size} worker(s)")
    samples = f"{work.num_prompts} prompts x {work.num_samples // work.num_prompts} = {work.num_samples} samples"
    table.add_row(
        "step", f"{samples} of {work.prompt_tokens} + {work.response_tokens} = {work.tokens_per_step:,} tokens"
    )
    table.add_row(
        "update",
        f"{work.num_updates} of {work.num_samples // work.num_updates} samples, {work.samples_per_rank:g} per rank in "
        f"{work.num_micro_batches} micro-batch(es) of {work.mean_micro_batch_tokens:,.0f}, at most "
        f"{work.micro_batch_tokens:,} tokens",
    )
    return table


def _pools(plan: RunPlan) -> Iterator[str]:
    for pool in run_pools(plan.config):
        roles = [placed.role.value for placed in pool.roles] + (["rollout"] if pool.num_workers else [])
        yield f"{pool.num_devices} in {pool.name} ({', '.join(roles)})"


def _stage_table(plan: RunPlan) -> Table:
    columns = ("layers", "dense", "experts", "weights", "gradients", "optimizer", "in flight", "logits")
    table = _table("A rank of the actor in each pipeline stage (parameters in millions)", "stage", *columns)
    for stage in plan.memory.stages:
        own, static, activations = stage.parameters, stage.static, stage.activations
        counts = (str(own.num_layers), *(f"{count / 1e6:,.1f}" for count in (own.num_dense, own.num_expert)))
        sizes = (static.weights, static.gradients, static.optimizer, activations.training, activations.loss)
        table.add_row(str(own.pp_rank), *counts, *map(binary, sizes))
    return table


def _device_table(plan: RunPlan) -> Table:
    """Show the fullest device of each phase and kind."""
    title = f"Fullest device per phase, of {plan.cluster.memory_gib:g} GiB"
    table = _table(title, "phase", "device", "memory", "verdict", "of which")
    for device in _fullest_per_phase(plan):
        parts = sorted(device.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {binary(size)}" for name, size in parts if size)
        table.add_row(device.phase.value, device.device, binary(device.total), device.verdict.value, shown)
    replica, memory = plan.memory.replica, plan.memory
    table.caption = (
        f"KV cache: {replica.kv_tokens:,} tokens per replica, {replica.kv_bytes_per_token:,} bytes each per worker; "
        f"{replica.running_samples} samples decode at once. Checkpoints: export {decimal(memory.export_bytes)}, with optimizer "
        f"{decimal(memory.training_state_bytes)}."
    )
    table.caption_justify = "left"
    return table


def _fullest_per_phase(plan: RunPlan) -> list[DeviceMemory]:
    worst: dict[tuple[Phase, str, bool], DeviceMemory] = {}
    for device in plan.memory.devices:
        key = (device.phase, device.pool, device.pp_rank is None)
        if key not in worst or device.total > worst[key].total:
            worst[key] = device
    return sorted(worst.values(), key=lambda device: list(Phase).index(device.phase))


def _sync_table(plan: RunPlan) -> Table:
    price = plan.sync.price
    table = _table(f"Weight sync ({plan.sync.transport})", "", "all workers", "busiest worker")
    for link in LinkClass:
        received = max(rank.received_bytes[link] for rank in price.destinations)
        table.add_row(_FROM[link], decimal(price.link_bytes[link]), decimal(received))
    table.add_row("on the wire", decimal(price.wire_bytes), "")
    table.add_row("lower bound", decimal(price.lower_bound_bytes), "")
    table.add_row("seconds", f"{price.lower_bound_seconds:.2f} - {price.seconds:.2f}", "")
    return table


def _timing_table(plan: RunPlan) -> Table:
    timing = plan.timing
    table = _table(
        "Seconds of a step, between what the hardware allows and a pessimistic figure", "phase", "s", "because"
    )
    decode, shares = timing.decode, f"MFU {timing.mfu.low:.1%} - {timing.mfu.high:.1%}, bubble {timing.bubble:.1%}"
    why = (
        f"{decode.num_samples} samples per replica, {1e3 * decode.seconds[1]:.1f} - {1e3 * decode.seconds[0]:.1f} ms per "
        f"token, bound by {decode.bound}: {decimal(decode.read_bytes)} read"
    )
    per_token = f"{timing.training_flops_per_token / 1e9:,.3f} GFLOP per token, {shares}"
    table.add_row("rollout", _range(timing.rollout), why)
    for name, seconds in timing.passes.items():
        table.add_row(name, _range(seconds), per_token if name == "update" else "")
    table.add_row("weight sync", _range(timing.weight_sync), "busiest port, without waiting and with")
    table.add_section()
    table.add_row("max_policy_lag 0", _range(timing.lag_0), "one phase after the other")
    if timing.lag_1 is None:
        table.add_row("max_policy_lag 1", "-", "shared devices: rollout and training would contend for them")
    else:
        reason = f"the faster side idles {timing.idle_share:.0%} of the time; samples are one version old"
        table.add_row("max_policy_lag 1", _range(timing.lag_1), reason)
    return table


def plan_json(plan: RunPlan, needs: tuple[str, ...]) -> dict[str, object]:
    """Return a prediction as plain values: bytes, seconds, counts.

    Args:
        needs: What keeps the run from starting here.
    """
    price, timing, memory = plan.sync.price, plan.timing, plan.memory
    worst = fullest(memory)
    return {
        "name": plan.config.name,
        "cluster": asdict(plan.cluster),
        "needs": list(needs),
        "num_devices": plan.num_devices,
        "num_nodes": plan.num_nodes,
        "num_parameters": plan.num_parameters,
        "num_active_parameters": plan.num_active_parameters,
        "workload": asdict(plan.work) | {"tokens_per_step": plan.work.tokens_per_step},
        "roles": {role.value: _role_json(memory) for role, memory in memory.roles.items()},
        "replica": asdict(memory.replica),
        "devices": [
            {"device": d.device, "phase": d.phase.value, "bytes": d.total, "verdict": d.verdict.value, "parts": d.parts}
            for d in memory.devices
        ],
        "verdict": memory.verdict.value,
        "fullest": {"device": worst.device, "phase": worst.phase.value, "bytes": worst.total},
        "export_bytes": memory.export_bytes,
        "training_state_bytes": memory.training_state_bytes,
        "weight_sync": {
            "transport": plan.sync.transport,
            "link_bytes": {link.name.lower(): price.link_bytes[link] for link in LinkClass},
            "wire_bytes": price.wire_bytes,
            "lower_bound_bytes": price.lower_bound_bytes,
            "staging_bytes": price.staging_bytes,
            "num_messages": price.num_messages,
            "seconds": price.seconds,
            "lower_bound_seconds": price.lower_bound_seconds,
        },
        "timing": asdict(timing) | {"lag_0": asdict(timing.lag_0)},
    }


def _role_json(memory: RoleMemory) -> list[dict[str, object]]:
    return [
        {
            "num_layers": stage.parameters.num_layers,
            "num_dense_parameters": stage.parameters.num_dense,
            "num_expert_parameters": stage.parameters.num_expert,
            "static_bytes": asdict(stage.static),
            "activation_bytes": asdict(stage.activations),
        }
        for stage in memory.stages
    ]


def _range(seconds: Seconds) -> str:
    return f"{seconds.low:,.1f} - {seconds.high:,.1f}" if seconds.high else "0"
