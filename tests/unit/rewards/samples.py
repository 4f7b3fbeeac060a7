"""Samples of which only the text matters."""

from __future__ import annotations

import numpy as np

from hybridrl.data.sample import FinishReason, Prompt, Sample


def sample(text: str, answer: str = "a", index: int = 0) -> Sample:
    return Sample(
        prompt=Prompt(f"p{index}", (1,), "question", answer, f"prompts.jsonl:{index}"),
        sample_index=index,
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        policy_versions=np.array([-1, 0], np.int32),
        finish_reason=FinishReason.STOP,
        num_turns=1,
        text=text,
    )
