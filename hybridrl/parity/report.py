"""The outcome of a parity check."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.parity.activations import Activations
from hybridrl.parity.causes import likely_causes
from hybridrl.parity.compare import Difference, LogprobGap, differences, first_over
from hybridrl.parity.options import ParityOptions

_CAUSE_OF_LAYOUT = "the model agrees on one rank: the parallel layout, its communication or how it loads its shards"
_CAUSE_OF_VLLM = (
    "Megatron agrees: vLLM computes this model otherwise; try another attention backend, or report it to vLLM"
)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far engines are from transformers.

    Attributes:
        operators: Of Megatron on one rank, in the order of computation.
        causes: What would explain the first operator over the tolerance.
        layout: Megatron in the configured layout.
        vllm: None when it was not asked.
    """

    options: ParityOptions
    operators: tuple[Difference, ...]
    causes: tuple[str, ...]
    one_rank: LogprobGap
    layout: LogprobGap
    vllm: LogprobGap | None = None

    @property
    def gaps(self) -> list[LogprobGap]:
        """All engines, in the order in which they were asked."""
        return [gap for gap in (self.one_rank, self.layout, self.vllm) if gap is not None]

    @property
    def first_over(self) -> Difference | None:
        """The first operator over the tolerance."""
        return first_over(self.operators, self.options.tolerance)

    @property
    def is_ok(self) -> bool:
        """Whether everything is within its tolerance."""
        return self.first_over is None and all(self.is_within(gap) for gap in self.gaps)

    def is_within(self, gap: LogprobGap) -> bool:
        """Tell whether an engine's log-probs are within the tolerance; what is not a number never is."""
        return gap.logprobs <= self.options.logprob_tolerance

    def findings(self) -> list[str]:
        """Say in words what differs and why, or that nothing does."""
        lines = []
        if (over := self.first_over) is not None:
            lines.append(
                f"first over the tolerance: {over.site}: relative difference {over.relative:.1e}, expected at most "
                f"{self.options.tolerance:.0e}; what it reads agrees"
            )
            lines += [f"likely cause: {cause}" for cause in self.causes]
        for gap in self.gaps:
            if not self.is_within(gap):
                lines.append(
                    f"{gap.engine}: log-probs differ by {gap.logprobs:.1e}, expected at most {self.options.logprob_tolerance:.0e}"
                )
                lines += [f"likely cause: {cause}" for cause in self._causes_after(gap)]
        return lines or [self._agreement()]

    def _causes_after(self, gap: LogprobGap) -> list[str]:
        if self.first_over is not None or not self.is_within(self.one_rank):
            return []
        return [_CAUSE_OF_LAYOUT] if gap is self.layout else [_CAUSE_OF_VLLM]

    def _agreement(self) -> str:
        operators = max(difference.relative for difference in self.operators)
        logprobs = max(gap.logprobs for gap in self.gaps)
        return f"parity: every operator within {operators:.1e} (relative), log-probs within {logprobs:.1e}"


def make_report(
    options: ParityOptions,
    reference: Activations,
    megatron: Activations,
    one_rank: LogprobGap,
    layout: LogprobGap,
    vllm: LogprobGap | None,
) -> ParityReport:
    """Compare operators and look for causes."""
    operators = tuple(differences(megatron, reference))
    over = first_over(operators, options.tolerance)
    causes = () if over is None else tuple(likely_causes(over.site, megatron, reference))
    return ParityReport(options, operators, causes, one_rank, layout, vllm)
