"""Where preflight checks put what they find: one line per problem, none about a key that is broken already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrl.config.load import Draft
from hybridrl.errors import ConfigError


@dataclass(slots=True)
class Report:
    """Problems that no key has alone.

    Attributes:
        needs: Those among `problems` that only a run has: files, packages and hardware that are not there.
    """

    draft: Draft
    problems: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    def add(
        self,
        key: str,
        got: object,
        expected: str,
        next_step: str,
        *,
        related: Sequence[str] = (),
        is_need: bool = False,
    ) -> None:
        """Note that the value of a key does not fit.

        Args:
            related: Other keys that the problem depends on. When one of all these keys is broken, the problem may be a
                consequence of that and is left out.
            is_need: Whether only a run has the problem.
        """
        if not any(self.draft.is_broken(name) for name in (key, *related)):
            problem = f"{self.draft.where(key)}: {key}: got {got}, expected {expected}; {next_step}"
            self.problems.append(problem)
            if is_need:
                self.needs.append(problem)

    def add_error(self, key: str, error: ConfigError) -> None:
        """Note what a check of a key's value raised."""
        if not self.draft.is_broken(key):
            self.problems.append(f"{self.draft.where(key)}: {key}: {error}")


def divisors(number: int) -> str:
    """Return the divisors of a number for a message, e.g. ``1, 2, 4``; at most the first ten."""
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")
