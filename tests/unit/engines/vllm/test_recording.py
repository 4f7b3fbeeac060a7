"""Recorded copies, turned into shards, must move exactly the elements that the copies would have moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.vllm.boxes import Write, merge_shards, shards_of_write
from hybridrl.engines.vllm.recording import RecordingTensor, WriteLog
from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box
from hybridrl.layout.shard import CanonicalTensor, Shard


def record(canonical: CanonicalTensor, parameter: torch.Tensor) -> tuple[RecordingTensor, WriteLog]:
    log = WriteLog({"local": parameter})
    return RecordingTensor.of(canonical, torch.int64, log), log


def shards_of(writes: list[Write], canonical: CanonicalTensor) -> list[Shard]:
    return merge_shards(shard for write in writes for shard in shards_of_write(write, canonical))


def deliver(shards: list[Shard], source: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Copy element ids through shards, as a reshard plan would."""
    for shard in shards:
        window = source[tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]
        local.view(-1).as_strided(shard.box.shape, shard.strides, shard.offset).copy_(window)
    return local


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    cuts = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        cuts.append(slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3))))
    return tuple(cuts)


@settings(deadline=None)
@given(st.data())
def test_shards_move_the_same_elements_as_the_recorded_copy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape)
    cut = data.draw(slices(shape))
    view = ids[cut]
    order = data.draw(st.permutations(range(view.ndim)))
    expected = torch.full((2, *view.permute(order).shape), -1)
    expected[1].copy_(view.permute(order))

    canonical = CanonicalTensor("w", shape)
    parameter = torch.empty(expected.shape, dtype=torch.int64, device="meta")
    recorded, log = record(canonical, parameter)
    parameter[1].copy_(recorded[cut].permute(order))

    assert torch.equal(deliver(shards_of(log.writes, canonical), ids, torch.full_like(expected, -1)), expected)


def test_a_tensor_loaded_row_by_row_is_one_shard() -> None:
    canonical = CanonicalTensor("w", (6, 4))
    parameter = torch.empty(8, 4, device="meta")
    recorded, log = record(canonical, parameter)
    for row in range(6):
        parameter[row + 2].copy_(recorded[row])
    assert shards_of(log.writes, canonical) == [Shard("w", Box((0, 0), (6, 4)), "local", 8, (4, 1))]


def test_a_flattened_view_is_one_shard() -> None:
    canonical = CanonicalTensor("w", (3, 4, 5))
    parameter = torch.empty(60, device="meta")
    recorded, log = record(canonical, parameter)
    parameter.copy_(recorded.reshape(-1))
    assert shards_of(log.writes, canonical) == [Shard("w", Box((0, 0, 0), (3, 4, 5)), "local", 0, (20, 5, 1))]


def test_a_column_cut_keeps_the_pitch_of_the_local_tensor() -> None:
    canonical = CanonicalTensor("down_proj", (3, 8))
    parameter = torch.empty(2, 3, 4, device="meta")
    recorded, log = record(canonical, parameter)
    parameter[1].copy_(recorded.narrow(1, 4, 4))
    assert shards_of(log.writes, canonical) == [Shard("down_proj", Box((0, 4), (3, 8)), "local", 12, (4, 1))]


def test_every_second_row_becomes_boxes_of_one_row() -> None:
    canonical = CanonicalTensor("w", (4, 3))
    parameter = torch.empty(2, 3, device="meta")
    recorded, log = record(canonical, parameter)
    parameter.copy_(recorded[1::2])
    assert [shard.box for shard in shards_of(log.writes, canonical)] == [Box((1, 0), (2, 3)), Box((3, 0), (4, 3))]


def test_a_cast_while_loading_is_followed() -> None:
    canonical = CanonicalTensor("w", (4, 3))
    parameter = torch.empty(3, dtype=torch.float32, device="meta")
    recorded, log = record(canonical, parameter)
    parameter.copy_(recorded[2].to(torch.float32))
    assert shards_of(log.writes, canonical) == [Shard("w", Box((2, 0), (3, 3)), "local", 0, (3, 1))]


def test_arithmetic_on_a_recorded_weight_is_refused() -> None:
    recorded, _ = record(CanonicalTensor("norm", (4,)), torch.empty(4, device="meta"))
    with pytest.raises(LayoutError, match=r"norm: the weight loader applies aten\.add.*only slices and copies"):
        recorded + 1


def test_a_broadcasting_copy_is_refused() -> None:
    parameter = torch.empty(2, 4, device="meta")
    recorded, _ = record(CanonicalTensor("scale", (4,)), parameter)
    with pytest.raises(
        LayoutError, match=r"scale: the weight loader broadcasts a view of shape \(4,\) into local \(2, 4\)"
    ):
        parameter.copy_(recorded)


def test_a_copy_into_an_unknown_tensor_is_refused() -> None:
    recorded, _ = record(CanonicalTensor("w", (4,)), torch.empty(4, device="meta"))
    with pytest.raises(LayoutError, match="w: the weight loader copies it into a tensor that no module owns"):
        torch.empty(4, device="meta").copy_(recorded)


def test_a_view_that_repeats_elements_is_refused() -> None:
    write = Write("w", "local", (2, 3), 0, (0, 1), 0, (3, 1))
    with pytest.raises(LayoutError, match=r"local: the weight loader copies w \(4, 3\).*not a set of boxes"):
        list(shards_of_write(write, CanonicalTensor("w", (4, 3))))
