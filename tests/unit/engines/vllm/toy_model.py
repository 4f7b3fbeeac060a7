"""A two-module model with vLLM's own reload records: a fused projection that is repacked after loading, and a norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from hybridrl.layout.shard import CanonicalTensor

CANONICAL = {name: CanonicalTensor(name, shape) for name, shape in {"gate": (3, 4), "up": (3, 4), "norm": (4,)}.items()}


class Repack(QuantizeMethodBase):
    """Keeps the negated weight, so that a weight in load format is never taken for a live one."""

    def __init__(self) -> None:
        self.num_calls = 0

    def create_weights(self, layer: nn.Module, *args: object, **kwargs: object) -> None: ...

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.num_calls += 1
        layer.weight = nn.Parameter(-layer.weight.data, requires_grad=False)


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.quant_method = Repack()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = Projection()
        self.norm = Norm()
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.weight.data.copy_(tensor)
            else:
                row = 0 if name == "gate" else 3
                self.gate_up.weight.data[row : row + 3].copy_(tensor)


def loaded_toy() -> ToyModel:
    """Return the model as vLLM leaves it: weights of value 1, the projection repacked."""
    model = ToyModel()
    model.load_weights((name, torch.ones(tensor.shape)) for name, tensor in CANONICAL.items())
    model.gate_up.quant_method.process_weights_after_loading(model.gate_up)
    return model
