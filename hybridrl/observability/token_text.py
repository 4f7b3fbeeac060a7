"""The text of each token of a sequence, so that the texts together are the text of the sequence.

A token alone does not always have a text: a character can be spread over several tokens, and some tokenizers drop a space that starts a
text. So each token is decoded behind the ones before it, and one that ends inside a character waits for the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
_MAX_WAITING = 4
"""Bytes of the longest character, and a token has one at least."""


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Return one text per token.

    Example: where tokens 7 and 8 are the two bytes of ``ë``, tokens 5, 7, 8 are ``No``, empty, ``ë``.
    """
    texts: list[str] = []
    context: list[int] = []
    waiting: list[int] = []
    for token in token_ids:
        waiting.append(token)
        text = decode([*context, *waiting])[len(decode(context)) :] if context else decode(waiting)
        if text.endswith(_UNFINISHED) and len(waiting) < _MAX_WAITING:
            texts.append("")
            continue
        texts.append(text)
        context, waiting = waiting, []
    if waiting:
        texts[-1] = decode(waiting)
    return texts
