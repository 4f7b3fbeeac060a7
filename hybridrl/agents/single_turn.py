"""One prompt, one response."""

from __future__ import annotations

from hybridrl.agents.loop import Trajectory
from hybridrl.data.generation import SamplingSpec, TokenEngine
from hybridrl.data.sample import Prompt, Sample
from hybridrl.data.tokenizer import Tokenizer


class SingleTurnLoop:
    """Lets the policy answer once, up to a stop token or the limit; see :class:`AgentLoop`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, prompt: Prompt, sample_index: int, engine: TokenEngine, sampling: SamplingSpec) -> Sample:
        """Play one sample to its end."""
        trajectory = Trajectory(prompt, sample_index)
        stop_token_ids = self._tokenizer.stop_token_ids
        completion = await trajectory.sample_turn(engine, sampling, stop_token_ids, sampling.max_tokens)
        return trajectory.finish(completion.finish_reason, self._tokenizer)
