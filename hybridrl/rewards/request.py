"""What is scored: one finished sample, as rewards see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridrl.data.sample import Sample


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One sample to score.

    Attributes:
        response: What the policy wrote, special tokens shown.
        final: The response without the stop token that ended it and without space around it.
        extra_info: JSON of the prompt's ``extra_info``; empty when there is none.
    """

    prompt: str
    response: str
    final: str
    answer: str
    data_source: str
    extra_info: str


RewardPart = Callable[[ScoreRequest], float]


def score_request(sample: Sample, stop_texts: Sequence[str]) -> ScoreRequest:
    """Return the request of a sample.

    Args:
        stop_texts: The stop tokens as the response shows them.
    """
    prompt, final = sample.prompt, sample.text
    for stop in stop_texts:
        if final.endswith(stop):
            final = final.removesuffix(stop)
            break
    return ScoreRequest(prompt.text, sample.text, final.strip(), prompt.answer, prompt.data_source, prompt.extra_info)
