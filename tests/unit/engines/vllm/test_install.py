"""Installing weights: into the live storage, module by module, and restartable."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from hybridrl.engines.vllm.install import ModuleSink
from hybridrl.engines.vllm.learn import LearnedLayout, learn_layout
from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.plan import Chunk
from tests.unit.engines.vllm.toy_model import CANONICAL, ToyModel, loaded_toy

GATE_UP_FIRST = Chunk(0, ("gate_up.weight",), ())
GATE_UP_REST = Chunk(1, ("gate_up.weight",), ("gate_up.weight",))
NORM = Chunk(2, ("norm.weight",), ("norm.weight",))


@pytest.fixture
def model() -> ToyModel:
    return loaded_toy()


@pytest.fixture
def layout(model) -> LearnedLayout:
    return learn_layout(model, CANONICAL, torch.float32, Place("rollout", 0, "node", "device"))


@pytest.fixture
def sink(model, layout) -> ModuleSink:
    return ModuleSink(model, layout, torch.float32)


def test_a_whole_module_is_processed_into_its_live_storage(model, sink):
    live, address = model.gate_up.weight, model.gate_up.weight.data_ptr()
    sink.open(GATE_UP_FIRST)["gate_up.weight"][:3] = 5
    sink.close(GATE_UP_FIRST)
    assert torch.equal(live, torch.full((6, 4), -1.0)), "a part of a module must not go live"
    sink.open(GATE_UP_REST)["gate_up.weight"][3:] = 7
    sink.close(GATE_UP_REST)
    assert model.gate_up.weight is live
    assert live.data_ptr() == address
    assert torch.equal(live, torch.tensor([[-5.0] * 4] * 3 + [[-7.0] * 4] * 3))


def test_finish_names_the_first_parameter_that_never_came(sink):
    sink.open(NORM)
    sink.close(NORM)
    with pytest.raises(ReshardError, match=r"1 of 2 parameters were not completed, the first is gate_up\.weight"):
        sink.finish()


def test_after_an_abort_another_transfer_can_start(model, layout, sink):
    live = model.gate_up.weight
    sink.open(GATE_UP_FIRST)["gate_up.weight"].fill_(5)
    sink.abort()
    assert model.gate_up.weight is live
    again = ModuleSink(model, layout, torch.float32)
    for chunk in (GATE_UP_REST, NORM):
        for tensor in again.open(chunk).values():
            tensor.fill_(2)
        again.close(chunk)
    again.finish()
    assert torch.equal(model.gate_up.weight, torch.full((6, 4), -2.0))
    assert torch.equal(model.norm.weight, torch.full((4,), 2.0))


def test_padding_is_zero_whatever_was_there(model, layout):
    layout.shard_map.padding["norm.weight"] = 1
    sink = ModuleSink(model, layout, torch.float32)
    assert torch.equal(sink.open(NORM)["norm.weight"], torch.zeros(4))


def test_modules_that_share_a_weight_are_both_processed():
    model = ToyModel()
    model.head = type(model.gate_up)()
    model.head.weight = model.gate_up.weight
    record_metadata_for_reloading(model)
    model.head.quant_method.process_weights_after_loading = lambda layer: setattr(layer, "packed", layer.weight * 10)
    model.gate_up.quant_method.process_weights_after_loading = lambda layer: None
    layout = learn_layout(model, CANONICAL, torch.float32, Place("rollout", 0, "node", "device"))
    sink = ModuleSink(model, layout, torch.float32)
    sink.open(GATE_UP_REST)["gate_up.weight"].fill_(3)
    sink.close(GATE_UP_REST)
    assert model.head.weight is model.gate_up.weight
    assert torch.equal(model.gate_up.weight, torch.full((6, 4), 3.0))
    assert torch.equal(model.head.packed, torch.full((6, 4), 30.0))


def test_a_module_that_changes_shape_between_loads_is_an_error(model, sink):
    model.gate_up.quant_method.process_weights_after_loading = lambda layer: setattr(
        layer, "weight", nn.Parameter(layer.weight.data[:3], requires_grad=False)
    )
    sink.open(GATE_UP_REST)
    with pytest.raises(ReshardError, match=r"gate_up\.weight: post-processing gave \(3, 4\) .* expected \(6, 4\)"):
        sink.close(GATE_UP_REST)
