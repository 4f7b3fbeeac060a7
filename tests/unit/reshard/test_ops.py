"""The kernels against slow references: copies, casts, checksums, and the checks at their boundary."""

import importlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ReshardError
from hybridrl.reshard.ops import (
    Cast,
    Side,
    buffer_table,
    canonical_checksum,
    load_acquire,
    segmented_copy,
    store_release,
    tensor_seed,
    verified_copy,
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


@pytest.mark.parametrize("row_bytes", [130, 384, 4000, 8192])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_strided_copies_lose_nothing(row_bytes, num_threads):
    rows, pitch = (17 << 20) // row_bytes, row_bytes + 6
    source = np.random.default_rng(0).integers(0, 256, rows * pitch, dtype=np.uint8)
    packed, spread = np.zeros(rows * row_bytes + 3, np.uint8), np.zeros_like(source)
    tables = buffer_table([source]), buffer_table([packed]), buffer_table([spread])
    segmented_copy(
        table([0, 0, pitch, 0, 3, row_bytes, rows, row_bytes]), tables[0], tables[1], num_threads=num_threads
    )
    segmented_copy(
        table([0, 3, row_bytes, 0, 0, pitch, rows, row_bytes]), tables[1], tables[2], num_threads=num_threads
    )
    want = source.reshape(rows, pitch)[:, :row_bytes]
    assert np.array_equal(packed[3:].reshape(rows, row_bytes), want)
    assert np.array_equal(spread.reshape(rows, pitch)[:, :row_bytes], want)
    assert not spread.reshape(rows, pitch)[:, row_bytes:].any()


@pytest.mark.parametrize("cast", [Cast.NONE, Cast.F32_TO_BF16])
def test_one_long_row_is_cut_between_threads(cast):
    source = torch.randn(1_500_007)
    got = torch.zeros(source.numel(), dtype=torch.float32 if cast is Cast.NONE else torch.bfloat16)
    segment = table([0, 0, 0, 0, 0, 0, 1, source.nbytes])
    segmented_copy(segment, buffer_table([source]), buffer_table([got]), cast=cast, num_threads=5)
    assert torch.equal(got, source.to(got.dtype))
    assert checksum(source.numpy(), cast=cast, num_threads=5) == checksum(source.numpy(), cast=cast, num_threads=1)


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


def scramble(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow_mix(seed, index, bits, num_bytes=4):
    """The definition in kernels/mix.hpp, in integers of any size."""
    if num_bytes == 8:
        return sum(slow_mix(seed, 2 * index + half, bits >> 32 * half & 0xFFFFFFFF) for half in (0, 1)) & MASK
    golden = 0x9E3779B97F4A7C15
    word, byte = divmod(index * num_bytes, 4)
    factor = scramble((word % 1024 + 1) * golden & MASK) >> 32 | 1
    block = scramble((scramble(seed) + word // 1024 * golden) & MASK) | 1
    return block * factor * (bits + 1 << 8 * byte) & MASK


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
    size = values.itemsize
    for start in (1000, 1001, 1002, 1003):
        want = sum(slow_mix(77, start + i, int(v), size) for i, v in enumerate(values)) & MASK
        assert checksum(values, start=start) == want


def test_checksum_of_wide_elements_takes_both_halves():
    values = np.random.default_rng(1).integers(2**40, 2**63, 33).astype(np.uint64)
    assert checksum(values) == sum(slow_mix(77, i, int(v), 8) for i, v in enumerate(values)) & MASK


def test_checksum_over_block_ends_equals_the_definition():
    values = np.random.default_rng(1).integers(0, 2**32, (3, 1500)).astype(np.uint32)
    want = sum(slow_mix(77, 1000 + r * 5000 + i, int(values[r, i])) for r in range(3) for i in range(1500)) & MASK
    assert checksum(values, start=1000, pitch=5000) == want


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


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_changes_the_checksum(dtype, data):
    values = np.random.default_rng(4).integers(0, np.iinfo(dtype).max, 3000, dtype=dtype)
    before = checksum(values)
    values[data.draw(st.integers(0, 2999))] ^= dtype(1 << data.draw(st.integers(0, values.itemsize * 8 - 1)))
    assert checksum(values) != before


@settings(max_examples=200, deadline=None)
@given(
    pair=st.lists(st.integers(0, 2999), min_size=2, max_size=2, unique=True),
    bits=st.lists(st.integers(0, 31), min_size=1, unique=True),
)
def test_two_elements_with_the_same_flips_change_the_checksum(pair, bits):
    values = np.random.default_rng(4).integers(0, 2**32, 3000, dtype=np.uint32)
    before = checksum(values)
    values[pair] ^= np.uint32(sum(1 << bit for bit in bits))
    assert checksum(values) != before


@settings(max_examples=200, deadline=None)
@given(pair=st.lists(st.integers(0, 2999), min_size=2, max_size=2, unique=True))
def test_two_swapped_elements_change_the_checksum(pair):
    values = np.arange(3000, dtype=np.float32)
    before = checksum(values)
    values[pair] = values[pair[::-1]]
    assert checksum(values) != before


def swap_rows(values):
    values[[1, 2]] = values[[2, 1]]


def shift_elements(values):
    values[:] = np.roll(values, 1)


def shift_rows(values):
    values[:] = np.roll(values, 1, axis=0)


def reverse_rows(values):
    values[:] = values[::-1].copy()


def negate(values):
    values ^= np.uint32(1 << 31)


def negate_a_rectangle(values):
    values[np.ix_([2, 9], [5, 1029])] ^= np.uint32(1 << 31)


def swap_blocks_of_columns(values):
    values[:, :1024], values[:, 1024:2048] = values[:, 1024:2048].copy(), values[:, :1024].copy()


@pytest.mark.parametrize(
    "damage", [swap_rows, shift_elements, shift_rows, reverse_rows, negate, negate_a_rectangle, swap_blocks_of_columns]
)
def test_damage_changes_the_checksum(damage):
    values = np.random.default_rng(4).integers(1, 2**32, (16, 2048), dtype=np.uint32)
    before = checksum(values)
    damage(values)
    assert checksum(values) != before


def test_zeros_count():
    sums = [checksum(np.zeros(n, np.uint32)) for n in range(1, 5)]
    assert len({0, *sums}) == 5


def test_same_values_elsewhere_have_another_checksum():
    values = np.ones(64, np.uint32)
    assert len({checksum(values), checksum(values, start=64), checksum(values, seed=tensor_seed("other"))}) == 3


@settings(max_examples=60, deadline=None)
@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    side=st.sampled_from(list(Side)),
    rows=st.integers(1, 40),
    elements=st.integers(1, 3000),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    start=st.integers(0, 5000),
    num_threads=st.sampled_from([1, 3]),
)
def test_verified_copy_equals_a_copy_and_a_checksum(itemsize, side, rows, elements, gaps, start, num_threads):
    pitches = [(elements + gap) * itemsize for gap in gaps[:2]]
    source = np.random.default_rng(5).integers(0, 256, rows * pitches[0], dtype=np.uint8)
    want, got = (np.full(rows * pitches[1], 7, np.uint8) for _ in range(2))
    index = [start, elements + gaps[2], 77, 0]
    copy = [0, 0, pitches[0], 0, 0, pitches[1], rows, elements * itemsize]
    sources = buffer_table([source])
    segmented_copy(table(copy), sources, buffer_table([want]))
    options = {"itemsize": itemsize, "num_slots": 1, "num_threads": num_threads}
    sums = verified_copy(table([*copy, *index]), sources, buffer_table([got]), side=side, **options)
    assert np.array_equal(got, want)
    memory, pitch = (source, pitches[0]) if side is Side.SOURCE else (want, pitches[1])
    checked = table([0, 0, pitch, rows, elements, *index])
    assert sums.tolist() == canonical_checksum(checked, buffer_table([memory]), **options).tolist()


def test_verified_copy_checks_its_table():
    buffers = buffer_table([np.zeros(100, np.uint8)])
    options = {"side": Side.SOURCE, "num_slots": 1}
    with pytest.raises(ReshardError, match=r"verified_copy: segment 0: source buffer 0 of 1 \(100 bytes\), offset 90"):
        verified_copy(table([0, 90, 0, 0, 0, 0, 1, 12, 0, 0, 7, 0]), buffers, buffers, itemsize=4, **options)
    with pytest.raises(ReshardError, match=r"segment 0: slot 1 is not in \[0, 1\)"):
        verified_copy(table([0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 7, 1]), buffers, buffers, itemsize=4, **options)
    with pytest.raises(ReshardError, match="segment 0: row_bytes 6 is not a multiple of itemsize 4"):
        verified_copy(table([0, 0, 0, 0, 0, 0, 1, 6, 0, 0, 7, 0]), buffers, buffers, itemsize=4, **options)


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


def test_tables_that_would_wrap_around_are_refused():
    buffers = buffer_table([np.zeros(64, np.uint8)])
    for row in ([0, 0, 2**62, 0, 0, 8, 5, 8], [0, 2**63 - 1, 0, 0, 0, 8, 2, 8], [0, 0, 0, 0, 0, 8, 2**62, 8]):
        with pytest.raises(ReshardError, match="do not fit"):
            segmented_copy(table(row), buffers, buffers)
    with pytest.raises(ReshardError, match=f"row_elements is {2**62}"):
        canonical_checksum(table([0, 0, 0, 1, 2**62, 0, 0, 1, 0]), buffers, itemsize=4, num_slots=1)


def test_destination_rows_that_overlap_are_refused():
    buffers = buffer_table([np.zeros(100, np.uint8)])
    with pytest.raises(ReshardError, match="segment 0: destination rows of 8 bytes overlap at pitch 4"):
        segmented_copy(table([0, 0, 8, 0, 0, 4, 3, 8]), buffers, buffers)


def test_tables_of_another_shape_or_type_are_refused():
    buffers = buffer_table([np.zeros(100, np.uint8)])
    with pytest.raises(ReshardError, match=r"segments has shape \[1, 7\], expected int64 \[n, 8\]"):
        segmented_copy(table([0] * 7), buffers, buffers)
    with pytest.raises(ReshardError, match="incompatible function arguments"):
        segmented_copy(np.zeros((1, 8)), buffers, buffers)


def test_unaligned_elements_are_refused_for_cuda_only():
    source, got = np.arange(64, dtype=np.uint8), np.zeros(32, np.uint8)
    sources, destinations = buffer_table([source]), buffer_table([got])
    segment = table([0, 2, 0, 0, 0, 0, 1, 32])
    segmented_copy(segment, sources, destinations, cast=Cast.F32_TO_BF16)
    with pytest.raises(ReshardError, match=r"segment 0: source address \d+ or pitch 0 is not a multiple of 4 bytes"):
        segmented_copy(segment, sources, destinations, cast=Cast.F32_TO_BF16, cuda_stream=0)
    with pytest.raises(ReshardError, match=r"segment 0: checksum address \d+ or pitch 0 is not a multiple of 8 bytes"):
        canonical_checksum(table([0, 4, 0, 1, 2, 0, 0, 1, 0]), sources, itemsize=8, num_slots=1, cuda_stream=0)


def test_flags_round_trip():
    word = np.zeros(1, np.int64)
    store_release(word.ctypes.data, 41)
    assert load_acquire(word.ctypes.data) == word[0] == 41


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_the_extension_holds_device_code_for_every_target(target):
    """A build whose nvcc fails goes on without device code, so where there is an nvcc this is checked."""
    binary = Path(importlib.import_module("hybridrl._C").__file__).read_bytes()
    assert f"-arch {target} ".encode() in binary
