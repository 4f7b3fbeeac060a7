"""Samples come back from disk as they were, to the bit."""

from __future__ import annotations

import functools
import operator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.data.sample_file import read_samples, write_samples

SAMPLE = Sample(
    prompt=Prompt("p/1", (5, 6), "a text", "7", "file:1", "maths", '{"level": 2}'),
    sample_index=3,
    token_ids=np.array([5, 6, 9, 10], dtype=np.int32),
    loss_mask=np.array([False, False, True, True]),
    rollout_logprobs=np.array([0, 0, -0.1, -np.float32(1) / 3], dtype=np.float32),
    policy_versions=np.array([-1, -1, 4, 5], dtype=np.int32),
    finish_reason=FinishReason.LENGTH,
    num_turns=2,
    text="<calc> ü",
)


def test_samples_of_several_batches_come_back_in_order_and_to_the_bit(tmp_path: Path) -> None:
    routed = replace(SAMPLE, sample_index=4, routing=np.arange(24, dtype=np.int16).reshape(4, 3, 2))
    empty = replace(SAMPLE, is_greedy=True, loss_mask=np.zeros(4, dtype=bool), finish_reason=FinishReason.STOP)
    batches = [[SAMPLE, routed], [], [empty]]
    write_samples(tmp_path / "samples.arrow", batches)
    found = read_samples(tmp_path / "samples.arrow", 3)
    assert [len(batch) for batch in found] == [2, 0, 1]
    for expected, got in zip(
        functools.reduce(operator.iadd, batches, []), functools.reduce(operator.iadd, found, []), strict=True
    ):
        for name in (field.name for field in fields(Sample)):
            one, other = getattr(expected, name), getattr(got, name)
            if isinstance(one, np.ndarray):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
            else:
                assert one == other, name


def test_no_samples_at_all_make_a_file_too(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.arrow", [])
    assert read_samples(tmp_path / "samples.arrow", 0) == []
