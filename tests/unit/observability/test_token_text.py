from collections.abc import Sequence

from hybridrl.observability.token_text import token_texts

BYTES = {1: b"No", 2: b"\xc3", 3: b"\xab", 4: b" au", 5: b"\xf0\x9f", 6: b"\x98\x80"}


def decode(ids: Sequence[int]) -> str:
    return b"".join(BYTES[token] for token in ids).decode(errors="replace")


def stripping(ids: Sequence[int]) -> str:
    """As tokenizers do that drop the space at the start of a text."""
    return decode(ids).removeprefix(" ")


def test_a_character_spread_over_tokens_belongs_to_the_last_of_them() -> None:
    assert token_texts([1, 2, 3, 5, 6], decode) == ["No", "", "ë", "", "😀"]


def test_a_space_in_front_of_a_token_is_kept_behind_another() -> None:
    assert token_texts([1, 4, 4], stripping) == ["No", " au", " au"]


def test_the_texts_together_are_the_text_also_when_it_ends_inside_a_character() -> None:
    for ids in ([1, 2], [1, 5], [5, 1, 2, 3], [3, 3, 3, 3, 1], []):
        assert "".join(token_texts(ids, decode)) == decode(ids), ids
