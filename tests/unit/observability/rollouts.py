"""Rollouts of known content for the tests of this folder."""

from __future__ import annotations

import numpy as np

from hybridrl.observability.records import RolloutRecord


def make_rollout(
    index: int = 0, *, num_tokens: int = 6, num_prompt_tokens: int = 2, response: str = "ok<eos>"
) -> RolloutRecord:
    produced = np.arange(num_tokens) >= num_prompt_tokens
    return RolloutRecord(
        prompt_id=f"calc:{index}",
        sample_index=index % 4,
        prompt=f"{index}+1=?",
        answer=str(index + 1),
        response=response,
        reward=float(index % 2),
        finish_reason="stop",
        num_turns=1,
        token_ids=np.arange(num_tokens, dtype=np.int32) + index,
        loss_mask=produced,
        rollout_logprobs=np.where(produced, -0.5, 0.0).astype(np.float32),
        old_logprobs=np.where(produced, -0.5 - 1e-5, 0.0).astype(np.float32),
        advantages=np.where(produced, 1.0, 0.0).astype(np.float32),
        policy_versions=np.where(produced, 3, -1).astype(np.int32),
    )
