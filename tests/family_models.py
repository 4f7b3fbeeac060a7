"""Small models with random weights, one or more per family, as Hugging Face checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

FOLDER = Path(__file__).parents[1] / "configs" / "families"
FAMILIES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def make_model(fields: dict, dtype: torch.dtype = torch.float32, seed: int = 3) -> transformers.PreTrainedModel:
    """Build a model whose biases, norms and correction biases all matter."""
    torch.manual_seed(seed)
    kind = {key: value for key, value in fields.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(fields["model_type"], **kind, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).to(dtype)
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.eval()
