r"""Rewards of Python programs: the share of a prompt's tests that the program in the response passes.

The answer of the prompt holds the tests, in one of two forms:

    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}   JSON; the program reads standard input and prints
    assert add(1, 2) == 3                                   Python that runs after the program, in its process

In the first form the expected output never enters the sandbox, which keeps programs from it as long as others on the machine cannot read the data files; a program that looks for them can see
the assertions of the second.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, replace

from hybridrl.config.schema import CodeRewardConfig
from hybridrl.errors import DataError
from hybridrl.rewards.request import ScoreRequest
from hybridrl.rewards.sandbox.program import Limits, Outcome, run_program

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodeReward:
    """Scores programs; see the module."""

    limits: Limits
    timeout_s: float

    def __call__(self, request: ScoreRequest) -> float:
        """Return the share of tests passed, 0 to 1.

        Raises:
            DataError: When the prompt's tests cannot be read.
            SandboxError: When this machine cannot confine programs.
        """
        program = program_of(request.final)
        tests = io_tests(request.answer)
        if tests is None:
            return float(self._passes_assertions(program, request.answer))
        deadline_s = time.monotonic() + self.timeout_s
        return sum(self._prints(program, stdin, expected, deadline_s) for stdin, expected in tests) / len(tests)

    def _prints(self, program: str, stdin: str, expected: str, deadline_s: float) -> bool:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        result = run_program(program, stdin, replace(self.limits, timeout_s=min(left_s, self.limits.timeout_s)))
        if result.outcome is not Outcome.EXITED or result.exit_code != 0:
            return False
        return _lines(result.output.decode("utf-8", "replace")) == _lines(expected)

    def _passes_assertions(self, program: str, assertions: str) -> bool:
        """Run the assertions after the program; they passed when a mark that it was not shown is printed at the end."""
        mark = secrets.token_hex(16)
        tail = "import sys as _sys\nexec(_sys.stdin.read())\n"
        result = run_program(f"{program}\n{tail}", f"{assertions}\nprint('\\n{mark}')", self.limits)
        return result.outcome is Outcome.EXITED and result.output.rstrip().endswith(mark.encode())


def make_code_reward(config: CodeRewardConfig) -> CodeReward:
    """Return the reward of a configuration."""
    return CodeReward(
        Limits(
            timeout_s=config.test_timeout_s,
            memory_mib=config.memory_mib,
            num_processes=config.num_processes,
            file_mib=config.file_mib,
            output_kib=config.output_kib,
            allow_network=config.allow_network,
        ),
        config.timeout_s,
    )


def program_of(text: str) -> str:
    """Return the last fenced block of Python in a response, or all of it when there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def io_tests(answer: str) -> list[tuple[str, str]] | None:
    """Return inputs and expected outputs; None when the answer is not JSON and thus Python assertions.

    Raises:
        DataError: When it is JSON but not of that form, or empty.
    """
    if not answer.strip():
        raise DataError("answer is empty, expected tests of the program")
    try:
        content = json.loads(answer)
    except ValueError:
        return None
    inputs, outputs = (
        (_texts(content.get(key)) for key in ("inputs", "outputs")) if isinstance(content, dict) else ([], [])
    )
    if not inputs or len(inputs) != len(outputs):
        raise DataError("answer is JSON, expected inputs and outputs, two lists of texts of one length")
    return list(zip(inputs, outputs, strict=True))


def _texts(value: object) -> list[str]:
    """Return a list of texts; an empty one for anything else."""
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else []


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
