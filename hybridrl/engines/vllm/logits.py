"""The logits that vLLM computes for a sequence: for comparisons with other implementations."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from hybridrl.config.choices import Platform
from hybridrl.engines.vllm.rotary import rotary_arguments

_CONTINUATION = "continuation"


def sequence_logits(folder: Path, token_ids: list[int], num_prompt_tokens: int, platform: Platform) -> torch.Tensor:
    """Load a checkpoint in float32, score a sequence, and give everything back.

    The first tokens are computed at once, as a prompt; the others one by one from the cache, as tokens are when they are sampled.
    Call it in a process with the variables of ``settings.environment``; models may follow one another.

    Args:
        num_prompt_tokens: From 1 to the number of tokens less one.

    Returns:
        [tokens - 1, vocabulary] float32: the logits after each token but the last. Those after the prompt are decoded.
    """
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=len(token_ids),
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        logits_processors=[_Continuation],
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        **rotary_arguments(folder, platform),
    )
    prompt, continuation = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=len(continuation),
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1,
        detokenize=False,
        extra_args={_CONTINUATION: continuation},
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    after = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    rows = [[row[token].logprob for token in range(len(row))] for row in after]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return torch.tensor(rows)


class _Continuation(AdapterLogitsProcessor):
    """Has vLLM "sample" given tokens; the raw logits that it reports are taken before."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        continuation = (params.extra_args or {}).get(_CONTINUATION)
        if continuation is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[continuation[len(output_ids)]] = 0.0
            return forced

        return force
