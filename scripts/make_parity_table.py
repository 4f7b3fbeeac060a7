"""Measure how far Megatron and vLLM are from transformers for every family, and write docs/parity.md.

Each model of ``configs/families`` gets random weights, is saved by transformers, and scores the same 192 tokens in float32 on
the CPU: in transformers, in Megatron-core (one rank) and, in a process of its own, in vLLM. To vLLM the first 128 are a prompt;
the others are decoded one by one.

    python scripts/make_parity_table.py [FAMILY ...]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
NUM_TOKENS = 192  # more than one block of vLLM's cache, which on a CPU is of 128 tokens, or of 16 in latent attention
NUM_PROMPT_TOKENS = 128
BOUNDS = {"megatron": 1e-4, "vllm": 1e-3}
# Engine and tokens of each pair of columns.
COLUMNS = (
    ("megatron", slice(NUM_TOKENS)),
    ("vllm", slice(NUM_PROMPT_TOKENS)),
    ("vllm", slice(NUM_PROMPT_TOKENS, NUM_TOKENS)),
)
HEAD = """# Parity

Largest difference from transformers over 192 tokens and the whole vocabulary, random weights, float32, CPU. Bounds on the
logits: Megatron-core 1e-4, vLLM 1e-3. vLLM computes the first 128 tokens as a prompt and decodes the others one by one from its
cache. The models are those of `configs/families`; `python scripts/make_parity_table.py` measures and writes this page. That an
import and an export give the same file bit for bit is tested for each in `tests/dist/test_megatron_numerics.py`, as are log-probs
with tp 2 and ep 2.

Moonlight is further off in vLLM, which takes the epsilon of the norm of compressed values from `rms_norm_eps`, here 1e-5, where
transformers and Megatron-core have 1e-6. With `rms_norm_eps: 1e-6` vLLM is within 3.2e-05 (prompt) and 5.1e-05 (decoded).

A pretrained model, SmolLM2-135M-Instruct in float32, goes from its checkpoint into Megatron-core with tp 1 and tp 3, and from there
into vLLM: over 5 greedy answers of 64 tokens all say the same as transformers, with log-probs within 2.1e-05 (Megatron-core) and
2.4e-05 (vLLM); `tests/e2e/test_smollm2.py`.

| model | Megatron logits | log-probs | vLLM logits, prompt | log-probs | vLLM logits, decoded | log-probs |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    """Measure the families on the command line, or all."""
    names = sys.argv[1:] or sorted(path.stem for path in (ROOT / "configs" / "families").glob("*.json"))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in names}
        token_ids = torch.randint(0, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        expected = {name: _transformers(name, folder, token_ids) for name, folder in folders.items()}
        context = multiprocessing.get_context("spawn")
        measured = {}
        for engine, score in {"megatron": _megatron, "vllm": _vllm}.items():
            with context.Pool(1) as pool:
                measured[engine] = pool.apply(score, (folders, token_ids))
    rows, has_failed = [], False
    for name, want in expected.items():
        cells = []
        for engine, tokens in COLUMNS:
            got = measured[engine][name]
            gap, logprob_gap = _gaps(got[tokens], want[: len(got)][tokens])
            has_failed |= not gap <= BOUNDS[engine]
            cells += [f"{gap:.1e}", f"{logprob_gap:.1e}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1])
    if not sys.argv[1:]:
        (ROOT / "docs" / "parity.md").write_text(HEAD + "\n".join(rows) + "\n")
    return int(has_failed)


def _gaps(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    logprobs = (got.double().log_softmax(-1) - want.double().log_softmax(-1)).abs().max()
    return float((got - want).abs().max()), float(logprobs)


def _transformers(name: str, folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Save a model with random weights and return the logits after each token, [tokens, vocabulary]."""
    import transformers

    torch.manual_seed(3)
    fields = json.loads((ROOT / "configs" / "families" / f"{name}.json").read_text())
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    biases = [tensor for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            tensor.add_(torch.randn_like(tensor) * 0.2)
        model.save_pretrained(folder)
        logits: torch.Tensor = model.eval()(torch.tensor([token_ids])).logits[0]
    return logits


def _megatron(folders: dict[str, Path], token_ids: list[int]) -> dict[str, torch.Tensor]:
    from hybridrl.config.choices import Platform
    from hybridrl.config.schema import ParallelConfig
    from hybridrl.engines.megatron import cpu
    from hybridrl.engines.megatron.process_groups import start_process_group
    from hybridrl.engines.megatron.single_rank import load_whole_model, logits_of

    cpu.install()
    with tempfile.NamedTemporaryFile() as store:
        groups = start_process_group(0, ParallelConfig(), Platform.CPU, f"file://{store.name}", timeout_s=60)
        return {name: logits_of(load_whole_model(folder, groups), token_ids) for name, folder in folders.items()}


def _vllm(folders: dict[str, Path], token_ids: list[int]) -> dict[str, torch.Tensor]:
    from hybridrl.config.choices import Platform
    from hybridrl.config.schema import RolloutConfig
    from hybridrl.engines.vllm.settings import environment

    os.environ.update(environment(Platform.CPU, RolloutConfig(kv_cache_gib=1), None))
    from hybridrl.engines.vllm.logits import sequence_logits

    return {
        name: sequence_logits(folder, token_ids, NUM_PROMPT_TOKENS, Platform.CPU) for name, folder in folders.items()
    }


if __name__ == "__main__":
    sys.exit(main())
