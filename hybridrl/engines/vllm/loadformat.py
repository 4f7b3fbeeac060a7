"""Parameters in the format that a checkpoint loads, beside the live ones that the kernels use.

After loading, vLLM repacks weights for its kernels; what is left of a parameter may be empty, padded or shuffled. vLLM
remembers for each module what its tensors looked like before that (`vllm.model_executor.model_loader.reload`). This file is
the only one that touches that record: it puts modules into load format, and puts their live tensors back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """The tensors of one module as the kernels use them."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    transient: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> LiveTensors:
        """Take hold of a module's tensors."""
        return cls(
            {name: tensor for name, tensor in module._parameters.items() if tensor is not None},
            {name: tensor for name, tensor in module._buffers.items() if tensor is not None},
            frozenset(module._non_persistent_buffers_set),
        )

    def put_back(self, module: nn.Module) -> None:
        """Make these the module's tensors again, and the only ones."""
        current = LiveTensors.of(module)
        for name in current.parameters | current.buffers:
            delattr(module, name)
        for name, parameter in self.parameters.items():
            module.register_parameter(name, parameter)
        for name, buffer in self.buffers.items():
            module.register_buffer(name, buffer, persistent=name not in self.transient)


@contextmanager
def model_in_load_format(model: nn.Module) -> Iterator[None]:
    """Put every module on the meta device in load format; on exit the live tensors are back, untouched."""
    live = {module: LiveTensors.of(module) for module in model.modules()}
    try:
        for module in live:
            restore_layer_on_meta(module, get_layerwise_info(module))
        yield
    finally:
        for module, tensors in live.items():
            tensors.put_back(module)


def is_loaded_in_place(module: nn.Module, name: str) -> bool:
    """Whether the kernels use a tensor as it was loaded, so that vLLM keeps no load format of it (router correction bias)."""
    return all(name not in recorded for recorded in get_layerwise_info(module).restore_metadata)


def materialize_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """Replace one tensor of a module by an uninitialised one in load format, and return it."""
    info = get_layerwise_info(module)
    parameters, buffers = info.restore_metadata
    with info.restore_device:
        if name in parameters or name in buffers:
            template = restore_layer_refs(parameters.get(name, buffers.get(name)), module)
            tensor = materialize_meta_tensor(template)
        else:
            # vLLM keeps no record of tensors that it loads in place, such as the router's score correction bias.
            tensor = torch.empty_like(getattr(module, name))
    is_buffer = name in module._buffers
    is_transient = name in module._non_persistent_buffers_set
    delattr(module, name)
    if is_buffer:
        module.register_buffer(name, tensor, persistent=not is_transient)
    else:
        module.register_parameter(name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False))
    return tensor
