"""Length penalty: responses that come near the limit lose reward, linearly.

Source: DAPO (arXiv 2503.14476), equation 13, "soft overlong punishment", times `penalty`.
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return what is added to the reward, from 0 to -penalty.

    Example: max_tokens 100, buffer_tokens 20, penalty 1: 0 up to 80 tokens, -0.5 at 90, -1 at 100.

    Args:
        num_tokens: Tokens that the policy produced.
        max_tokens: ``rollout.max_response_tokens``.
        buffer_tokens: Last tokens over which the penalty grows; 0 turns it off.
    """
    if buffer_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(max(excess / buffer_tokens, 0.0), 1.0)
