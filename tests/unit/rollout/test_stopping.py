"""A stop string ends a response with the token that completes it: as transformers does, and as the whole text says."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, StopStringCriteria

from vlm_pg.rollout.stopping import StopStrings

TINY = Path(__file__).parents[3] / "assets/tiny-qwen2_5-vl"
# Of one token, of several, across tokens, of characters of two, three and four bytes, one inside another.
STRINGS = ("</answer>", "\n\nQuestion:", "é!", "日本", "🙂 ok", "ab", "xabx")
SEQUENCES, LENGTH = 60, 40


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def tokens_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def text_of(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids, skip_special_tokens=False)


def spelled(text: str) -> list[int]:
    """The text with one token per byte."""
    byte_tokens = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return tokenizer().convert_tokens_to_ids(list(byte_tokens))


def random_sequence(generator: random.Random) -> list[int]:
    """Random tokens and pieces of the stop strings, some spelled byte by byte: matches and near misses occur."""
    ids: list[int] = []
    while len(ids) < LENGTH:
        if generator.random() < 0.5:
            ids.append(generator.randrange(len(tokenizer())))
        else:
            string = generator.choice(STRINGS)
            piece = generator.choice([tokens_of, spelled])(generator.choice(["", "x", "</", "日"]) + string)
            ids += piece[generator.randrange(2) : len(piece) - generator.randrange(2)]
    return ids[:LENGTH]


@pytest.mark.parametrize("strings", [STRINGS, *[(string,) for string in STRINGS]], ids=str)
def test_ends_where_transformers_criterion_ends(strings: tuple[str, ...]) -> None:
    """At every prefix of random sequences, those that go on after a match included."""
    generator = random.Random(0)
    sequences = [random_sequence(generator) for _ in range(SEQUENCES)]
    criterion = StopStringCriteria(tokenizer(), list(strings))
    stop = StopStrings(tokenizer(), strings)
    matches = 0
    for length in range(1, LENGTH + 1):
        expected = criterion(torch.tensor([sequence[:length] for sequence in sequences]), None).tolist()
        assert [stop.ends(sequence[:length]) for sequence in sequences] == expected
        matches += sum(expected)
    assert matches > 10


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3, unique=True))
def test_the_first_end_is_where_the_whole_text_first_contains_a_string(seed: int, strings: list[str]) -> None:
    sequence = random_sequence(random.Random(seed))
    stop = StopStrings(tokenizer(), strings)
    lengths = range(1, LENGTH + 1)
    by_text = next((n for n in lengths if any(s in text_of(sequence[:n]) for s in strings)), None)
    assert next((n for n in lengths if stop.ends(sequence[:n])), None) == by_text
    if by_text is not None:
        text = text_of(sequence[:by_text])
        assert stop.cut(sequence[:by_text]) == text[: min(text.find(s) for s in strings if s in text)]


def test_a_string_completed_inside_the_last_token_ends_the_response() -> None:
    """'</think>' is one token of this tokenizer: 'x' and '</th' lie before and within it."""
    ids = [*tokens_of("x"), *tokens_of("</think>")]
    assert len(ids) == 2
    stop = StopStrings(tokenizer(), ["x</th"])
    assert stop.ends(ids)
    assert not stop.ends(ids[:1])
    assert not stop.ends([*ids, *tokens_of("x")])
    assert stop.cut(ids) == ""


def test_a_character_that_is_not_complete_ends_nothing() -> None:
    ids = spelled("本")
    stop = StopStrings(tokenizer(), ["本"])
    assert [stop.ends(ids[:n]) for n in range(4)] == [False, False, False, True]


def test_ids_without_a_token_add_nothing_to_the_text() -> None:
    """Models have more rows than their tokenizer has tokens."""
    first, second = spelled("ab")
    unknown = [len(tokenizer()) + 7] * 30
    assert text_of(unknown) == ""
    stop = StopStrings(tokenizer(), ["ab"])
    assert stop.ends([first, *unknown, second])
    assert not stop.ends([first, second, *unknown])


def test_every_token_has_the_bytes_it_decodes_to() -> None:
    stop = StopStrings(tokenizer(), [])
    for token in range(len(tokenizer())):
        assert stop._token_bytes(token).decode(errors="replace") == text_of([token])


def test_only_trailing_tokens_are_looked_at() -> None:
    class Counted(list[int]):
        looked_at = 0

        def __getitem__(self, index: Any) -> Any:
            assert isinstance(index, int)
            self.looked_at += 1
            return super().__getitem__(index)

    ids = Counted(spelled("z") * 5000)
    assert not StopStrings(tokenizer(), ["</answer>", "ab"]).ends(ids)
    assert ids.looked_at == len("</answer>")


def test_the_text_is_cut_before_the_string_that_begins_first() -> None:
    stop = StopStrings(tokenizer(), ["b", "abc", "</answer>"])
    assert stop.cut([*tokens_of("xx a"), *tokens_of("b")]) == "xx a"
    assert stop.cut([*tokens_of("A"), *tokens_of("</answer>")]) == "A"


def test_a_string_completed_before_the_last_token_stays_in_the_text() -> None:
    """It came before the fewest tokens were there."""
    stop = StopStrings(tokenizer(), ["b"])
    assert stop.cut(spelled("abcb")) == "abc"


def test_of_a_text_what_comes_before_the_first_string_is_kept() -> None:
    stop = StopStrings(tokenizer(), ["b", "abc", "</answer>"])
    assert stop.before_first("xx abc") == "xx "
    assert stop.before_first("A</answer>\nb") == "A"
    assert stop.before_first("nothing") == "nothing"


def test_no_strings_end_nothing() -> None:
    stop = StopStrings(tokenizer(), [])
    assert not stop.ends(tokens_of("</answer>"))


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.stop_strings has an empty string.*remove it"):
        StopStrings(tokenizer(), ["</answer>", ""])


def test_a_string_the_tokenizer_never_writes_is_refused() -> None:
    """Qwen's tokenizers compose characters: an e with a combining accent becomes one character."""
    with pytest.raises(ValueError, match=r"rollout\.stop_strings has 'e\u0301'.* decodes to '\u00e9'.*Write it as"):
        StopStrings(tokenizer(), ["</answer>", "e\u0301"])


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, of the tokens 'a' and 'b' only."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_character_the_tokenizer_has_no_bytes_for_is_refused() -> None:
    assert StopStrings(small_tokenizer(), ["ab"]).ends([0, 1])
    with pytest.raises(ValueError, match=r"has 'ac'.*decodes to 'a'.*or remove it"):
        StopStrings(small_tokenizer(), ["ac"])


def test_an_added_token_is_read_as_it_is_written() -> None:
    """Added tokens are not in the byte alphabet: a space in one is a space."""
    with_added = small_tokenizer()
    with_added.add_tokens(["日 b"])
    assert with_added.decode([0, 2]) == "a日 b"
    stop = StopStrings(with_added, ["a日 b"])
    assert stop.ends([0, 2])
    assert not stop.ends([1, 2])


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    with pytest.raises(ValueError, match=r"needs a byte-level tokenizer.*Use rollout\.stop_token_ids"):
        StopStrings(PreTrainedTokenizerFast(tokenizer_object=backend), ["ab"])
