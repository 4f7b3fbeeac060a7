"""What several samples of a prompt say about a policy: pass@k, mean@n, majority@n."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of k samples, drawn without replacement from these, is correct.

    This is the unbiased estimator of pass@k, 1 - C(n - c, k) / C(n, k). Example: n 4, c 1, k 2 give 1 - 3/6 = 0.5.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Args:
        k: 1 to `num_samples`.
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(answers: Sequence[Hashable], is_correct: Sequence[bool]) -> bool:
    """Return whether the most frequent answer is correct; among equally frequent ones the first given counts.

    Samples of one answer can differ in reward (one may lack the format, for example): the answer counts as correct when
    one of them is.
    """
    counts = {answer: answers.count(answer) for answer in dict.fromkeys(answers)}
    winner = max(counts, key=lambda answer: counts[answer])
    return any(correct for answer, correct in zip(answers, is_correct, strict=True) if answer == winner)


def ks_up_to(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and `num_samples`. Example: 6 gives 1, 2, 4, 6."""
    powers = [2**exponent for exponent in range(num_samples.bit_length()) if 2**exponent < num_samples]
    return [*powers, num_samples]
