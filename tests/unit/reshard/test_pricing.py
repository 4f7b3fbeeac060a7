"""Prices of plans, against sums by hand."""

from dataclasses import replace

import pytest
from rich.console import Console

from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from hybridrl.reshard.pricing import price_plan, price_table
from hybridrl.reshard.topology import H100_CLUSTER, LinkClass, Topology

ROWS, COLUMNS = 1000, 250
ONE_ROW = COLUMNS * 4
# 1 GB/s per NIC and 10 GB/s inside a node, so that 1 MB takes 1 ms and 0.1 ms.
TOPOLOGY = Topology("test", device_gb_per_s=100, node_gb_per_s=10, nic_gb_per_s=1, nics_per_node=1, message_s=0.0)


def holder(role, rank, node, device, rows):
    """Return the map of a rank that holds some rows of one [1000, 250] float32 tensor, 1 MB in all."""
    local = LocalTensor("w", (len(rows), COLUMNS), DType.FLOAT32)
    shard = Shard("w", Box((rows.start, 0), (rows.stop, COLUMNS)), "w", 0, (COLUMNS, 1))
    return ShardMap(
        Place(role, rank, node, device), {"w": local}, (shard,), {"w": CanonicalTensor("w", (ROWS, COLUMNS))}
    )


def price(sources, destinations, topology=TOPOLOGY, chunk_bytes=1 << 30):
    plan = build_plan(sources, destinations, chunk_bytes=chunk_bytes)
    return price_plan(plan, topology, lower_bound_bytes(sources, destinations))


def halves(nodes, devices="00"):
    return [holder("actor", i, nodes[i], devices[i], range(500 * i, 500 * (i + 1))) for i in range(2)]


def test_receiving_nic_of_one_destination_is_the_limit():
    got = price(halves("ab"), [holder("rollout", 0, "c", "0", range(ROWS))])
    assert got.seconds == pytest.approx(1e-3) and got.lower_bound_seconds == pytest.approx(1e-3)
    assert got.link_bytes == (0, 0, ROWS * ONE_ROW) and got.wire_bytes == got.lower_bound_bytes == ROWS * ONE_ROW
    assert got.nic_sent_bytes == {"a": (500 * ONE_ROW,), "b": (500 * ONE_ROW,), "c": (0,)}
    assert got.nic_received_bytes == {"a": (0,), "b": (0,), "c": (ROWS * ONE_ROW,)}
    assert got.num_messages == 2 and got.bytes_per_destination == ROWS * ONE_ROW


def test_devices_share_the_nics_of_their_node():
    destinations = [holder("rollout", i, "c", str(i), range(ROWS)) for i in range(2)]
    assert price(halves("ab"), destinations).seconds == pytest.approx(2e-3)
    assert price(halves("ab"), destinations, replace(TOPOLOGY, nics_per_node=2)).seconds == pytest.approx(1e-3)


def test_a_single_source_is_the_limit_of_many_destinations():
    source = [holder("actor", 0, "a", "0", range(ROWS))]
    destinations = [holder("rollout", i, f"n{i}", "0", range(ROWS)) for i in range(5)]
    got = price(source, destinations)
    assert got.seconds == pytest.approx(5e-3) and got.lower_bound_seconds == pytest.approx(1e-3)


def test_links_are_told_apart():
    sources = halves("ab")
    got = price(sources, [holder("rollout", 0, "a", "0", range(ROWS)), holder("rollout", 1, "b", "7", range(ROWS))])
    device, node, network = got.link_bytes
    assert (device, node, network) == (500 * ONE_ROW, 500 * ONE_ROW, 2 * 500 * ONE_ROW)
    assert got.destinations[0].received_bytes == (500 * ONE_ROW, 0, 500 * ONE_ROW)
    assert got.destinations[1].received_bytes[LinkClass.NODE] == 500 * ONE_ROW
    assert got.sources[1].sent_bytes == (0, 500 * ONE_ROW, 500 * ONE_ROW)


def test_copies_on_a_device_take_its_own_rate():
    got = price(halves("aa", "01"), halves("aa", "01"))
    assert got.wire_bytes == got.lower_bound_bytes == 0 and got.num_messages == 0
    assert got.seconds == pytest.approx(0.5e-3 / 100)


def test_messages_cost_time_and_chunks_bound_the_staging():
    source, destination = [holder("actor", 0, "a", "0", range(ROWS))], [holder("rollout", 0, "b", "0", range(ROWS))]
    got = price(source, destination, replace(TOPOLOGY, message_s=1e-3), chunk_bytes=100 * ONE_ROW)
    assert got.num_messages == 10 and got.staging_bytes == 200 * ONE_ROW
    assert got.seconds == pytest.approx(1e-3 + 10 * 1e-3)


def test_the_table_says_what_is_on_the_wire():
    got = price(halves("ab"), [holder("rollout", 0, "c", "0", range(ROWS))], H100_CLUSTER)
    console = Console(record=True, width=120)
    console.print(price_table(got, "one tensor"))
    text = console.export_text()
    assert "one tensor on 8 x H100" in text and "on the wire" in text and "lower bound" in text
