"""A good experiment on disk, to be broken by tests: a tiny checkpoint with headers but no real weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from hybridrl.layout.families import model_spec

MODEL: dict[str, object] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
_OF_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
DENSE: dict[str, object] = {
    **{key: value for key, value in MODEL.items() if key not in _OF_EXPERTS},
    "model_type": "qwen3",
    "intermediate_size": 24,
}

TRAIN = """\
name: demo
platform: cpu
model:
  path: weights
actor:
  parallel: {tp_size: 2, pp_size: 2, ep_size: 2}
  micro_batch: {tokens: 1024}
rollout:
  max_response_tokens: 14
  max_model_tokens: 64
data:
  task: calc
  max_prompt_tokens: 16
algorithm:
  prompts_per_step: 4
  samples_per_prompt: 8
"""
FILE_TASK = """\
name: demo
platform: cpu
model: {path: weights}
rollout: {max_response_tokens: 14, max_model_tokens: 64}
data: {task: file, train_path: train.jsonl, eval_path: eval.jsonl, max_prompt_tokens: 16}
reward: {function: "rewards.py:score"}
"""
SFT = """\
name: demo
platform: cpu
model: {path: weights, init: random}
data: {task: calc, max_prompt_tokens: 16}
sft: {output_path: OUTPUT}
"""


def write_experiment(folder: Path, text: str = TRAIN, model: dict[str, object] | None = None) -> Path:
    """Write a configuration and everything that it names; return the configuration's path."""
    weights = folder / "weights"
    weights.mkdir()
    write_model(weights, model or MODEL)
    write_demo_tokenizer(weights)
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=?", "answer": "2"}) + "\n")
    (folder / "rewards.py").write_text("def score(response, answer):\n    return 1.0\n")
    path = folder / "run.yaml"
    path.write_text(text.replace("OUTPUT", str(folder / "out")))
    return path


def write_model(folder: Path, config: dict[str, object]) -> None:
    """Write ``config.json`` and a safetensors file of zeros."""
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in model_spec(config).tensors().items():
        start, end = end, end + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    content = len(encoded).to_bytes(8, "little") + encoded + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
