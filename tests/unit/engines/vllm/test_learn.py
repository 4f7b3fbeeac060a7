"""Learning a layout: complete, proved, and invisible to the live model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridrl.engines.vllm.learn import LearnedLayout, learn_layout
from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import LocalTensor, Place, Shard
from tests.unit.engines.vllm.toy_model import CANONICAL, ToyModel, loaded_toy

PLACE = Place("rollout", 0, "node", "device")


def learn(model: nn.Module) -> LearnedLayout:
    return learn_layout(model, CANONICAL, torch.float32, PLACE)


def test_shards_are_what_the_loader_copies_in_module_order():
    shard_map = learn(loaded_toy()).shard_map
    assert list(shard_map.tensors.values()) == [
        LocalTensor("gate_up.weight", (6, 4), DType.FLOAT32),
        LocalTensor("norm.weight", (4,), DType.FLOAT32),
    ]
    assert shard_map.shards == (
        Shard("gate", Box((0, 0), (3, 4)), "gate_up.weight", 0, (4, 1)),
        Shard("up", Box((0, 0), (3, 4)), "gate_up.weight", 12, (4, 1)),
        Shard("norm", Box((0,), (4,)), "norm.weight", 0, (1,)),
    )


def test_learning_leaves_the_live_tensors_in_place():
    model = loaded_toy()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    learn(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)


def test_a_parameter_that_no_tensor_fills_is_an_error():
    model = loaded_toy()
    model.load_weights = lambda weights: ToyModel.load_weights(model, (w for w in weights if w[0] != "norm"))
    with pytest.raises(
        LayoutError, match=r"rollout rank 0: no checkpoint tensor is loaded into norm\.weight \(4,\); expected one"
    ):
        learn(model)


def test_a_parameter_that_is_filled_in_part_is_an_error():
    model = loaded_toy()
    model.load_weights = lambda weights: ToyModel.load_weights(model, (w for w in weights if w[0] != "up"))
    with pytest.raises(LayoutError, match=r"shards cover 12 of the 24 elements of gate_up\.weight"):
        learn(model)


def test_a_parameter_that_is_written_twice_is_an_error():
    model = loaded_toy()

    def load_twice(weights):
        for name, tensor in weights:
            ToyModel.load_weights(model, [(name, tensor)])
            if name == "norm":
                model.norm.weight.data[:2].copy_(tensor[2:])

    model.load_weights = load_twice
    with pytest.raises(LayoutError, match=r"norm \[.*\] overlaps another shard of norm\.weight"):
        learn(model)


def test_the_live_tensors_are_back_when_a_loader_fails():
    model = loaded_toy()
    weight = model.gate_up.weight

    def load_scaled(weights):
        for name, tensor in weights:
            ToyModel.load_weights(model, [(name, tensor * 2)])

    model.load_weights = load_scaled
    with pytest.raises(LayoutError, match=r"gate: the weight loader applies aten\.mul"):
        learn(model)
    assert model.gate_up.weight is weight


def test_shared_weights_are_one_local_tensor():
    model = loaded_toy()
    model.head = nn.Module()
    model.head.weight = model.gate_up.weight
    assert learn(model).tied == {"gate_up.weight": ("head.weight",)}
