"""Stop strings: which token completes one, and the text before it.

Strings are looked for in bytes. A byte-level tokenizer's tokens are runs of bytes that may begin and end within a
character, and joining them is the same as decoding them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlm_pg.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Which responses have completed a stop string.

    Args:
        tokenizer: a byte-level one, as all Qwen models have.
        strings: as in ``rollout.stop_strings``.

    Raises:
        ConfigError: a string is empty, or not what the tokenizer makes of it, or the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._bytes_of_token: dict[int, bytes] = {}
        self._strings = tuple(strings)
        self._encoded = tuple(string.encode() for string in strings)
        self._longest = max(map(len, self._encoded), default=0)
        for string in strings:
            self._check(string)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop string's last character came with the last of these tokens.

        Looks at as many trailing tokens as the longest stop string has bytes, however long the response is.

        Args:
            token_ids: all tokens of one response so far.
        """
        if not token_ids or not self._strings:
            return False
        tail = last = self._token_bytes(token_ids[-1])
        for index in range(len(token_ids) - 2, -1, -1):
            if len(tail) >= len(last) + self._longest - 1:
                break
            tail = self._token_bytes(token_ids[index]) + tail
        before = len(tail) - len(last)
        # The search starts where a match still reaches into the last token.
        return any(tail.find(string, max(0, before - len(string) + 1)) >= 0 for string in self._encoded)

    def cut(self, token_ids: Sequence[int]) -> str:
        """The text of a response that has ended, before the stop string that its last token completed.

        An earlier one, from before the fewest tokens were there, stays.
        """
        pieces = [self._token_bytes(token) for token in token_ids]
        text, before = b"".join(pieces), sum(map(len, pieces[:-1]))
        found = [text.find(string, max(0, before - len(string) + 1)) for string in self._encoded]
        return text[: min(position for position in found if position >= 0)].decode(errors="replace")

    def before_first(self, text: str) -> str:
        """The text before the first stop string in it; all of it if there is none."""
        found = [position for string in self._strings if (position := text.find(string)) >= 0]
        return text[: min(found)] if found else text

    def _check(self, string: str) -> None:
        if not string:
            raise ConfigError(
                "rollout.stop_strings has an empty string, which every response contains; remove it from the list."
            )
        read_back = self._decode(self._encode(string))
        if string not in read_back:
            raise ConfigError(
                f"rollout.stop_strings has {string!r}, which this model's tokenizer encodes and decodes to "
                f"{read_back!r}. The model reads and writes the second form, so responses would not stop at the first. "
                "Write it as the tokenizer does, or remove it."
            )
        # A leading space tells other kinds of tokenizers apart: they write it as a character of their own.
        for token in self._encode(" " + string):
            if self._token_bytes(token).decode(errors="replace") != self._decode([token]):
                raise ConfigError(
                    f"rollout.stop_strings needs a byte-level tokenizer, as all Qwen models have; this one "
                    f"({type(self._tokenizer).__name__}) is not. Use rollout.stop_token_ids, or remove the strings."
                )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for an id that the model has and the tokenizer has not."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            assert isinstance(token, str)
            if all(character in self._byte_of for character in token):
                known = bytes(self._byte_of[character] for character in token)
            else:  # an added token with characters outside the byte alphabet, kept as it is written
                known = token.encode()
            self._bytes_of_token[token_id] = known
        return known
