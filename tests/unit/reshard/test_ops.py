"""The kernels against slow references: copies, casts, checksums, and the checks at their boundary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ReshardError
from hybridrl.reshard.ops import (
    Cast,
    buffer_table,
    canonical_checksum,
    load_acquire,
    segmented_copy,
    store_release,
    tensor_seed,
)

MASK = 2**64 - 1


def table(*rows):
    return np.array(rows, dtype=np.int64)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    row_bytes=st.integers(1, 700),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    offsets=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    num_threads=st.integers(0, 3),
)
def test_copy_moves_exactly_the_rows(rows, row_bytes, gaps, offsets, num_threads):
    pitches = [row_bytes + gap for gap in gaps]
    source = np.random.default_rng(0).integers(0, 256, offsets[0] + rows * pitches[0], dtype=np.uint8)
    got, want = (np.full(offsets[1] + rows * pitches[1], 7, np.uint8) for _ in range(2))
    for row in range(rows):
        a, b = offsets[0] + row * pitches[0], offsets[1] + row * pitches[1]
        want[b : b + row_bytes] = source[a : a + row_bytes]
    segment = table([0, offsets[0], pitches[0], 0, offsets[1], pitches[1], rows, row_bytes])
    segmented_copy(segment, buffer_table([source]), buffer_table([got]), num_threads=num_threads)
    assert np.array_equal(got, want)


def test_large_copy_is_split_over_threads_without_loss():
    source = torch.randn(3000, 1024)
    got = torch.zeros(3000, 512)
    segment = table([0, 2048, 4096, 0, 0, 2048, 3000, 2048])
    segmented_copy(segment, buffer_table([source]), buffer_table([got]), num_threads=4)
    assert torch.equal(got, source[:, 512:])


def test_many_segments_and_buffers():
    sources = [torch.randn(5, 8) for _ in range(3)]
    got = torch.zeros(15, 8)
    segments = table(*[[i, 0, 32, 0, i * 160, 32, 5, 32] for i in range(3)])
    segmented_copy(segments, buffer_table(sources), buffer_table([got]))
    assert torch.equal(got, torch.cat(sources))


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, float("inf"), -float("inf"), 1e-40, -1e-45, 3.3895314e38, 65504.0, 1.00390625, 1.01171875]
)


def test_float32_rounds_to_the_nearest_even_bfloat16():
    source = torch.cat([SPECIAL, torch.randn(999), torch.randint(-(2**31), 2**31, (4096,)).int().view(torch.float32)])
    got = torch.zeros(source.numel(), dtype=torch.bfloat16)
    segment = table([0, 0, 0, 0, 0, 0, 1, source.nbytes])
    segmented_copy(segment, buffer_table([source]), buffer_table([got]), cast=Cast.F32_TO_BF16)
    want = source.bfloat16()
    is_nan = torch.isnan(source)
    assert torch.equal(got[~is_nan].view(torch.int16), want[~is_nan].view(torch.int16))
    assert torch.isnan(got[is_nan]).all()


def test_bfloat16_widens_exactly():
    source = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    got = torch.zeros(source.numel())
    segmented_copy(
        table([0, 0, 0, 0, 0, 0, 1, source.nbytes]), buffer_table([source]), buffer_table([got]), cast=Cast.BF16_TO_F32
    )
    assert torch.equal(got.view(torch.int32), source.view(torch.int16).int() << 16)


def slow_mix(seed, index, bits):
    x = (seed + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    key = ((x ^ x >> 31) + index * 0x9E3779B97F4A7C15) & MASK

    def term(key, bits):
        p = ((key & 0xFFFFFFFF) * ((key >> 32) | 1) ^ key) & MASK
        q = ((p >> 32) * ((p & 0xFFFFFFFF) | 1) & MASK) ^ ((p << 32 | p >> 32) & MASK)
        return (bits + (q & 0xFFFFFFFF)) * ((q >> 32) | 1)

    return (
        term(key, bits) if bits < 2**32 else term(key, bits & 0xFFFFFFFF) + term(key ^ 0xD1B54A32D192ED03, bits >> 32)
    )


def checksum(values, start=0, pitch=None, seed=77, cast=Cast.NONE, num_threads=1):
    values = np.atleast_2d(values)
    rows, width = values.shape
    segment = table([0, 0, values.strides[0], rows, width, start, pitch or width, seed, 0])
    flat = np.lib.stride_tricks.as_strided(
        values, ((rows - 1) * values.strides[0] // values.itemsize + width,), (values.itemsize,)
    )
    buffers = table([flat.ctypes.data, (rows - 1) * values.strides[0] + width * values.itemsize])
    return int(
        canonical_checksum(segment, buffers, itemsize=values.itemsize, num_slots=1, cast=cast, num_threads=num_threads)[
            0
        ]
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_checksum_equals_the_definition(dtype):
    values = np.random.default_rng(1).integers(0, np.iinfo(dtype).max, 101).astype(dtype)
    want = sum(slow_mix(77, 1000 + i, int(v)) for i, v in enumerate(values)) & MASK
    assert checksum(values, start=1000) == want


def test_checksum_of_wide_elements_takes_both_halves():
    values = np.random.default_rng(1).integers(2**40, 2**63, 33).astype(np.uint64)
    assert checksum(values) == sum(slow_mix(77, i, int(v)) for i, v in enumerate(values)) & MASK


def test_checksum_after_rounding_equals_that_of_the_rounded_tensor():
    values = torch.randn(1003)
    rounded = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert checksum(values.numpy(), cast=Cast.F32_TO_BF16) == checksum(rounded)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 30), width=st.integers(2, 70), cut=st.floats(0.1, 0.9), by_row=st.booleans())
def test_checksum_does_not_depend_on_the_cut(rows, width, cut, by_row):
    values = np.random.default_rng(2).integers(0, 2**32, (rows, width)).astype(np.uint32)
    whole = checksum(values)
    if by_row and rows > 1:
        at = max(1, int(rows * cut))
        parts = [checksum(values[:at]), checksum(values[at:], start=at * width)]
    else:
        at = max(1, int(width * cut))
        parts = [checksum(values[:, :at], pitch=width), checksum(values[:, at:], start=at, pitch=width)]
    assert sum(parts) & MASK == whole


def test_checksum_on_threads_equals_one_thread():
    values = np.random.default_rng(3).integers(0, 2**32, (2000, 1031)).astype(np.uint32)
    assert checksum(values, num_threads=4) == checksum(values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v.__setitem__((3, 5), v[3, 5] ^ 1),
        lambda v: v.__setitem__([1, 2], v[[2, 1]]),
        lambda v: v.__setitem__(slice(None), np.roll(v, 1)),
        lambda v: v.__setitem__(slice(None), v[::-1].copy()),
        lambda v: v.__setitem__((0, slice(0, 2)), v[0, 1::-1].copy()),
        lambda v: v.__setitem__((0, 0), 0),
    ],
    ids=["bit", "rows", "shift", "reversed", "neighbours", "zeroed"],
)
def test_damage_changes_the_checksum(damage):
    values = np.random.default_rng(4).integers(1, 2**32, (16, 64)).astype(np.uint32)
    before = checksum(values)
    damage(values)
    assert checksum(values) != before


def test_same_values_elsewhere_have_another_checksum():
    values = np.ones(64, np.uint32)
    assert len({checksum(values), checksum(values, start=64), checksum(values, seed=tensor_seed("other"))}) == 3


def test_rows_outside_their_buffer_are_named_with_values():
    buffers = buffer_table([np.zeros(100, np.uint8)])
    with pytest.raises(
        ReshardError,
        match=r"segment 1: source buffer 0 of 1 \(100 bytes\), offset 90, pitch 0, 1 rows of 11 bytes do not fit",
    ):
        segmented_copy(table([0, 0, 0, 0, 0, 0, 1, 4], [0, 90, 0, 0, 0, 0, 1, 11]), buffers, buffers)
    with pytest.raises(ReshardError, match=r"segment 0: destination buffer 3 of 1"):
        segmented_copy(table([0, 0, 0, 3, 0, 0, 1, 4]), buffers, buffers)
    with pytest.raises(ReshardError, match=r"pitch -4"):
        segmented_copy(table([0, 8, -4, 0, 0, 4, 2, 4]), buffers, buffers)
    with pytest.raises(ReshardError, match=r"row_bytes 6 is not a multiple of the source element size 4"):
        segmented_copy(table([0, 0, 0, 0, 0, 0, 1, 6]), buffers, buffers, cast=Cast.F32_TO_BF16)


def test_checksum_arguments_are_checked():
    buffers = buffer_table([np.zeros(100, np.uint8)])
    with pytest.raises(ReshardError, match=r"slot 2 is not in \[0, 2\)"):
        canonical_checksum(table([0, 0, 0, 1, 4, 0, 0, 1, 2]), buffers, itemsize=4, num_slots=2)
    with pytest.raises(ReshardError, match=r"itemsize is 3"):
        canonical_checksum(table([0, 0, 0, 1, 4, 0, 0, 1, 0]), buffers, itemsize=3, num_slots=2)
    with pytest.raises(ReshardError, match=r"checksum buffer 0 of 1 \(100 bytes\)"):
        canonical_checksum(table([0, 0, 0, 1, 26, 0, 0, 1, 0]), buffers, itemsize=4, num_slots=1)


def test_flags_round_trip():
    word = np.zeros(1, np.int64)
    store_release(word.ctypes.data, 41)
    assert load_acquire(word.ctypes.data) == word[0] == 41
