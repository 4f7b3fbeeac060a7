"""The declared layout and the real modules must agree by name, shape and contiguity."""

from __future__ import annotations

import pytest
import torch

from hybridrl.engines.megatron.model import check_tensors
from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.shard import LocalTensor, Place, ShardMap

DECLARED = ShardMap(
    Place("actor", 3, "node", "cpu"),
    {"0.a": LocalTensor("0.a", (4, 2), DType.FLOAT32), "0.b": LocalTensor("0.b", (3,), DType.FLOAT32)},
    (),
    {},
)


def test_agreement_passes():
    check_tensors(DECLARED, {"0.a": torch.zeros(4, 2), "0.b": torch.zeros(3)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.a": torch.zeros(4, 2)}, "0.b: declared but not in the model"),
        ({"0.a": torch.zeros(2, 4), "0.b": torch.zeros(3)}, r"0.a: got shape \(2, 4\), expected \(4, 2\)"),
        (
            {"0.a": torch.zeros(4, 2), "0.b": torch.zeros(3), "0.c": torch.zeros(1)},
            r"0.c: in the model \(1,\) but not declared",
        ),
        ({"0.a": torch.zeros(2, 4).T, "0.b": torch.zeros(3)}, r"0.a: strides \(1, 4\), expected a contiguous tensor"),
    ],
)
def test_each_difference_is_named_with_its_rank(tensors, message):
    with pytest.raises(LayoutError, match=f"actor rank 3: the model differs from its declared layout: {message}"):
        check_tensors(DECLARED, tensors)
