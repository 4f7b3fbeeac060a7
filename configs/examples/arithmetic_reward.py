"""A reward function: any Python file will do, named in the configuration as ``file.py:function``."""

import re

_LAST_NUMBER = re.compile(r"-?[0-9]+(?=[^0-9]*$)")


def score(response: str, answer: str) -> float:
    """Return 1 when the last number of the response is the answer, a tenth for any number, else 0.

    Args:
        response: What the policy wrote, with special tokens shown; it ends with a stop token unless it was cut.
        answer: The prompt's answer.
    """
    match = _LAST_NUMBER.search(response)
    if match is None:
        return 0.0
    return 1.0 if match.group() == answer else 0.1
