"""The logits that vLLM computes for a prompt: for comparisons with other implementations."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def prompt_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Load a checkpoint in float32, score a prompt, and give everything back.

    Call it in a process with the variables of ``settings.environment``; models may follow one another.

    Returns:
        [tokens - 1, vocabulary] float32: the logits after each token but the last.
    """
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=len(token_ids) + 1,
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
    rows = [[row[token].logprob for token in range(len(row))] for row in output.prompt_logprobs[1:]]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return torch.tensor(rows)
