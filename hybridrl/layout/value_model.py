"""Critics and reward models: any family, with a linear layer in place of the vocabulary projection.

Source: transformers ``modeling_layers.py``: token classification names it ``score`` with a bias, sequence classification
``score`` without; older models name it ``classifier``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridrl.errors import LayoutError
from hybridrl.layout.checkpoint import FileTensor, read_checkpoint_index
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.model import ModelSpec, ValueHead

_NAMES = ("score", "classifier")
# Of a checkpoint that has none, such as the policy's that a critic starts from: as token classification has it.
_NEW_HEAD = ValueHead("score.weight", "score.bias", num_labels=1)


def new_value_model_spec(folder: Path) -> ModelSpec:
    """Declare the model in `folder` with a new value head, from its configuration alone.

    Raises:
        LayoutError: When the configuration cannot be read.
    """
    return replace(read_model_spec(folder), value_head=_NEW_HEAD)


def read_value_model_spec(folder: Path) -> ModelSpec:
    """Declare the model in `folder` with the value head that its files have, or else a new one of one label.

    Raises:
        LayoutError: When the configuration or the weights cannot be read, or the head is no linear layer of the model's size.
    """
    spec = new_value_model_spec(folder)
    return replace(spec, value_head=_find_head(read_checkpoint_index(folder), spec, folder) or _NEW_HEAD)


def backbone(spec: ModelSpec) -> ModelSpec:
    """Return a value model without its head, nor a vocabulary projection: what it has in common with a policy."""
    return replace(spec, value_head=None, is_tied=True)  # tied, so that the projection is no tensor of the model


def _find_head(index: dict[str, FileTensor], spec: ModelSpec, folder: Path) -> ValueHead | None:
    for name in _NAMES:
        weight, bias = f"{name}.weight", f"{name}.bias"
        if weight in index:
            shape = index[weight].tensor.shape
            if len(shape) != 2 or shape[1] != spec.hidden_size:
                raise LayoutError(f"{folder}: {weight} has shape {shape}, expected [labels, {spec.hidden_size}]")
            return ValueHead(weight, bias if bias in index else None, shape[0])
    return None
