"""Model families: one file each, from an HF ``config.json`` to a :class:`ModelSpec`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.errors import LayoutError
from hybridrl.layout.families import deepseek, glm4, gpt_oss, llama, mixtral, qwen2, qwen3
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.families.harmless import HARMLESS
from hybridrl.layout.model import ModelSpec

_CONFIG = "config.json"
_FAMILIES: dict[str, Callable[[HfFields], ModelSpec]] = {
    "deepseek_v2": deepseek.v2_spec,
    "deepseek_v3": deepseek.v3_spec,
    "glm4_moe": glm4.moe_spec,
    "gpt_oss": gpt_oss.moe_spec,
    "llama": llama.dense_spec,
    "mixtral": mixtral.moe_spec,
    "qwen2": qwen2.dense_spec,
    "qwen2_moe": qwen2.moe_spec,
    "qwen3": qwen3.dense_spec,
    "qwen3_moe": qwen3.moe_spec,
}
_WITH_MTP: dict[str, Callable[[HfFields], ModelSpec]] = {
    "deepseek_v3": partial(deepseek.v3_spec, has_mtp=True),
    "glm4_moe": partial(glm4.moe_spec, has_mtp=True),
}


def supported_families() -> tuple[str, ...]:
    """Return the supported values of ``model_type``."""
    return tuple(sorted(_FAMILIES))


def model_spec(hf_config: Mapping[str, object], where: str = "config.json", *, has_mtp: bool = False) -> ModelSpec:
    """Declare the model that an HF configuration describes.

    Args:
        hf_config: Parsed ``config.json``.
        where: Named in errors.
        has_mtp: Whether to declare the multi-token-prediction layers too. Left out by default: few uses need them, and
            transformers does not save them.

    Raises:
        LayoutError: For an unsupported family, or a field that is missing, of a wrong type, or not known to the family.
    """
    fields = HfFields(hf_config, where)
    family = fields.string("model_type")
    if family not in _FAMILIES:
        raise LayoutError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(supported_families())}. "
            "Use a checkpoint of one of these families."
        )
    spec = (_WITH_MTP if has_mtp and family in _WITH_MTP else _FAMILIES)[family](fields)
    fields.refuse_unread(HARMLESS)
    return spec


def read_model_spec(folder: Path) -> ModelSpec:
    """Read ``config.json`` in `folder` and declare its model.

    Raises:
        LayoutError: When the file is missing, is not JSON, or describes an unsupported model.
    """
    return model_spec(read_hf_config(folder), str(folder / _CONFIG))


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` in `folder`.

    Raises:
        LayoutError: When the file is missing, or is not a JSON object.
    """
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise LayoutError(f"{path}: no such file; expected a Hugging Face checkpoint folder") from e
    except ValueError as e:
        raise LayoutError(f"{path}: not valid JSON ({e}); restore the file from the checkpoint") from e
    if not isinstance(config, dict):
        raise LayoutError(
            f"{path}: got {type(config).__name__}, expected a JSON object; restore it from the checkpoint"
        )
    return config


def differing_fields(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the fields in which two configurations differ, but for those that change nothing that a model computes."""
    return sorted(name for name in {*one, *other} - HARMLESS if one.get(name) != other.get(name))
