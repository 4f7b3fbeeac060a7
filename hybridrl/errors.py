"""The errors that users see.

Each message says where the fault lies, what was got, what was expected and what to do next. Code raises the
narrowest class; only process boundaries catch :class:`HybridRLError` itself.
"""


class HybridRLError(Exception):
    """Root of every error that HybridRL raises on purpose."""


class ConfigError(HybridRLError):
    """A configuration that cannot run. Carries every problem found, not just the first.

    Args:
        problems: One line per problem, each with its place (``file:line: key``), value and expectation.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class DataError(HybridRLError):
    """A prompt file, row or sample that cannot be used; names file and row."""


class LayoutError(HybridRLError):
    """A weight layout that is inconsistent or unknown; names the parameter and the range."""


class ReshardError(HybridRLError):
    """A reshard plan or transfer that cannot be carried out; names parameter and ranks."""


class PeerLostError(ReshardError):
    """A transfer whose other end failed or gave no answer; what that end says itself comes nearer to the cause."""


class EngineError(HybridRLError):
    """A training or generation engine that failed; names role, rank and phase."""


class EngineLostError(EngineError):
    """An engine whose processes have ended, though the process that drives it lives; only a new start helps."""


class RankLostError(EngineError):
    """A process that died, lost its connection or gave no answer. Nothing that the code raised: another start may go well.

    Attributes:
        can_go_on: Whether the same command, given again, goes on with the run.
    """

    can_go_on = False


class HangError(RankLostError):
    """A run in which nothing moved any more; names role, rank, phase and call of what holds it up."""


class WeightSyncError(HybridRLError):
    """A weight sync that was not committed; the previous policy_version stays in force."""


class CheckpointError(HybridRLError):
    """A checkpoint that cannot be written or resumed; names the file."""
