"""Tokens are chosen as by transformers' logits processors, from random numbers that depend on names; stop strings."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, StopStringCriteria

from vlm_pg.rollout.sampling import Choice, StopStrings, TokenSampler, rollout_key, uniforms
from vlm_pg.rollout.settings import RolloutSettings

VOCAB_SIZE = 24
MEDIA, STOPS = (3, 17), (0, 5)
# Tokens of the prompt and of the response so far, for the repetition penalty: probable and improbable ones, repeated.
PROMPT, RESPONSE = (1, 9, 9, 20, 3), (9, 12)
DEVICE = torch.device("cpu")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 100},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition reward": {"repetition_penalty": 0.7},
    "min_new_tokens": {"min_new_tokens": 3},
    "min_new_tokens reached": {"min_new_tokens": 2},
    "temperature, top_k and top_p": {"temperature": 1.3, "top_p": 0.7, "top_k": 9},
    "top_k, top_p and min_p": {"top_k": 12, "top_p": 0.95, "min_p": 0.05},
    "everything": {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
                   "min_new_tokens": 3},
    "greedy": {"temperature": 0.0},
    "greedy, other settings on": {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.3,
                                  "repetition_penalty": 2.0, "min_new_tokens": 3},
}  # fmt: skip
SAMPLED = [name for name, given_settings in SETTINGS.items() if given_settings.get("temperature") != 0.0]


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Different rows; the stop tokens and one media token are among the most probable."""
    values = 1.5 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    values[:, [STOPS[0], MEDIA[0]]] += 3.0
    values[:, RESPONSE[0]] += 2.0
    return values


def sampler(**values: Any) -> TokenSampler:
    return TokenSampler(RolloutSettings(max_new_tokens=100, **values), VOCAB_SIZE, MEDIA, STOPS, DEVICE)


def seen(rows: int) -> torch.Tensor:
    mask = torch.zeros(rows, VOCAB_SIZE, dtype=torch.bool)
    mask[:, list(PROMPT + RESPONSE)] = True
    return mask


def choose(settings: dict[str, Any], values: torch.Tensor, uniform: torch.Tensor) -> Choice:
    rows = len(values)
    return sampler(**settings).choose(values, uniform, [len(RESPONSE)] * rows, seen(rows))


class Generates(GenerationMixin):
    """As much of a model as the choice of processors looks at."""

    config = SimpleNamespace(is_encoder_decoder=False)


def transformers_scores(settings: RolloutSettings, values: torch.Tensor) -> torch.Tensor:
    """What ``generate`` with these settings would draw from: its own processors in its own order."""
    config = GenerationConfig(
        do_sample=settings.temperature > 0,
        temperature=settings.temperature or None,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        min_new_tokens=settings.min_new_tokens,
        suppress_tokens=list(MEDIA),
        num_beams=1,
    )
    config._eos_token_tensor = torch.tensor(STOPS)
    generates: Any = Generates()
    processors: Any = generates._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu")
    return processors(torch.tensor([PROMPT + RESPONSE] * len(values)), values.clone())


def one_stream(count: int) -> torch.Tensor:
    return torch.from_numpy(uniforms([rollout_key(0, 1, "sample", 0)], count)[0])


def chi_square_999(degrees: int) -> float:
    """99.9 % quantile of chi-square (Wilson and Hilferty 1931; for 1, 5 and 20 degrees 10.8, 20.5 and 45.3)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * spread**0.5) ** 3


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_transformers_to_the_bit(name: str) -> None:
    values = logits(rows=50)
    expected = transformers_scores(RolloutSettings(**SETTINGS[name]), values)
    before = values.clone()
    scores = sampler(**SETTINGS[name]).scores(values, [len(RESPONSE)] * 50, seen(50))
    assert torch.equal(scores, expected)
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_token_has_its_interval_of_the_random_number(name: str) -> None:
    """The middle of a token's interval in transformers' cumulative distribution chooses this token, with its
    log-probability: probabilities and support are equal, without chance."""
    values = logits(seed=3)
    expected = transformers_scores(RolloutSettings(**SETTINGS[name]), values)[0].double().softmax(-1)
    support = expected.nonzero()[:, 0]
    middles = (expected.cumsum(-1) - expected / 2)[support]
    chosen = choose(SETTINGS[name], values.expand(len(support), -1), middles)
    assert chosen.tokens.tolist() == support.tolist()
    assert torch.allclose(chosen.sampling_logprobs.double().exp(), expected[support], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probabilities_and_entropies_are_the_policys(name: str) -> None:
    """Penalties, forbidden tokens and filters change what is chosen, not what is said about the policy."""
    values = logits(rows=200)
    chosen = choose(SETTINGS[name], values, one_stream(200))
    temperature = SETTINGS[name].get("temperature", 1.0)
    if not temperature:
        expected = transformers_scores(RolloutSettings(**SETTINGS[name]), values).argmax(-1)
        assert torch.equal(chosen.tokens, expected) and (chosen.sampling_logprobs == 0).all()
    policy = (values / (temperature or 1.0)).log_softmax(-1)
    assert torch.equal(chosen.logprobs, policy.gather(1, chosen.tokens[:, None])[:, 0])
    assert torch.allclose(chosen.entropies, -(policy.exp() * policy).sum(-1), rtol=0, atol=1e-6)
    assert chosen.tokens.dtype == torch.int64
    assert {chosen.logprobs.dtype, chosen.sampling_logprobs.dtype, chosen.entropies.dtype} == {torch.float32}


def test_stop_tokens_wait_for_each_rows_own_length() -> None:
    values = torch.zeros(4, VOCAB_SIZE)
    values[:, STOPS[1]] = 50.0
    chosen = sampler(min_new_tokens=3).choose(values, one_stream(4), [0, 3, 2, 9], None)
    assert [token in STOPS for token in chosen.tokens.tolist()] == [False, True, False, True]


def test_tied_scores_are_filtered_as_by_transformers() -> None:
    """Top-k keeps every token that equals the k-th, so more than k; top-p cuts through a tie."""
    values = torch.zeros(1, VOCAB_SIZE)
    values[0, [8, 9, 10, 11]] = 60.0  # a quarter each, to the bit
    assert torch.isfinite(sampler(top_k=5).scores(values, [0], None)).sum() == VOCAB_SIZE - len(MEDIA)
    scores = sampler(top_p=0.5).scores(values, [0], None)
    assert torch.equal(scores, transformers_scores(RolloutSettings(top_p=0.5), values))
    assert torch.isfinite(scores).sum() == 2


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.integers(-12, 12).map(lambda i: i / 2), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB_SIZE + 1),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.1, 4.0]),
    min_new_tokens=st.integers(0, 4),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_any_settings_agree_with_transformers(values: list[float], uniform: float, **settings: Any) -> None:
    """Logits are multiples of a half, so most examples have ties."""
    row = torch.tensor([values])
    expected = transformers_scores(RolloutSettings(max_new_tokens=100, **settings), row)
    assert torch.equal(sampler(**settings).scores(row, [len(RESPONSE)], seen(1)), expected)
    chosen = choose(settings, row, torch.tensor([uniform], dtype=torch.float64))
    assert torch.isfinite(expected[0, chosen.tokens[0]])
    if settings["temperature"]:
        assert torch.allclose(chosen.sampling_logprobs, expected.log_softmax(-1)[0, chosen.tokens], atol=1e-5)


def test_the_edges_of_the_unit_interval_choose_possible_tokens() -> None:
    """A probability of exactly 0 at either end of the vocabulary is stepped over."""
    edge = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    chosen = TokenSampler(RolloutSettings(), 4, (), (), DEVICE).choose(edge, uniform, [0, 0], None)
    assert chosen.tokens.tolist() == [1, 2]
    assert torch.allclose(chosen.entropies, torch.tensor(2.0).log())


def test_logits_that_are_not_numbers_show_in_every_number() -> None:
    values = torch.full((1, VOCAB_SIZE), torch.nan)
    chosen = choose({}, values, one_stream(1))
    assert 0 <= chosen.tokens.item() < VOCAB_SIZE
    assert chosen.logprobs.isnan().all() and chosen.sampling_logprobs.isnan().all() and chosen.entropies.isnan().all()


def test_a_draw_depends_on_its_name_and_not_on_the_rows_around_it() -> None:
    names = [(0, step, sample, rollout) for step in (1, "eval/seen") for sample in ("a", "b") for rollout in range(4)]
    values = logits(rows=len(names))
    settings = SETTINGS["everything"]

    def draw(rows: list[int]) -> list[tuple[int, float, float]]:
        uniform = torch.from_numpy(uniforms([rollout_key(*names[row]) for row in rows], 6)[:, 5])
        chosen = choose(settings, values[rows], uniform)
        return list(
            zip(chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.sampling_logprobs.tolist(), strict=True)
        )

    together = draw(list(range(len(names))))
    shuffled = [5, 0, 11, 3, 15, 8]
    assert draw(shuffled) == [together[row] for row in shuffled]
    assert [draw([row])[0] for row in range(len(names))] == together
    assert len({token for token, _, _ in together}) > 3


@pytest.mark.parametrize("settings", [SETTINGS["everything"], SETTINGS["greedy"], {"presence_penalty": 1.5}], ids=str)
def test_the_host_never_waits_for_the_device(settings: dict[str, Any]) -> None:
    """A tensor without values cannot be read by the host: the call would raise."""
    with FakeTensorMode():
        values, uniform = torch.empty(2, VOCAB_SIZE), torch.empty(2, dtype=torch.float64)
        seen, generated = torch.empty(2, 2, VOCAB_SIZE, dtype=torch.bool)
        chosen = sampler(**settings).choose(values, uniform, [0, 1], seen, generated)
    parts = (chosen.tokens, chosen.logprobs, chosen.sampling_logprobs, chosen.entropies)
    assert all(part.shape == (2,) for part in parts)


def test_the_presence_penalty_is_taken_once_behind_the_repetition_penalty_and_before_the_temperature() -> None:
    """Token 1 is in the prompt alone, 2 is in the response (once or often is the same); by hand."""
    row = torch.tensor([[1.0, 4.0, 3.0, -2.0]])
    saw = torch.tensor([[False, True, True, True]])
    answered = torch.tensor([[False, False, True, True]])
    given = RolloutSettings(repetition_penalty=2.0, presence_penalty=1.5, temperature=0.5)
    scores = TokenSampler(given, 4, (), (), DEVICE).scores(row, [2], saw, answered)
    # 1 / 0.5; (4 / 2) / 0.5; (3 / 2 - 1.5) / 0.5; (-2 * 2 - 1.5) / 0.5
    assert scores.tolist() == [[2.0, 4.0, 0.0, -11.0]]
    greedy = RolloutSettings(presence_penalty=1.5, temperature=0.0)
    assert TokenSampler(greedy, 4, (), (), DEVICE).scores(row, [2], None, answered).tolist() == [[1.0, 4.0, 1.5, -3.5]]
    assert row.tolist() == [[1.0, 4.0, 3.0, -2.0]]


def test_settings_out_of_range_are_refused() -> None:
    for penalty in (-2.01, 2.01):
        with pytest.raises(ValueError, match="presence_penalty"):
            RolloutSettings(presence_penalty=penalty)
    for token in (VOCAB_SIZE, -1):
        with pytest.raises(ValueError, match=rf"Stop tokens \[{token}\] .* 0 to 23\. Correct rollout\.stop_token_ids"):
            TokenSampler(RolloutSettings(), VOCAB_SIZE, MEDIA, (*STOPS, token), DEVICE)


def test_streams_are_uniform_and_independent() -> None:
    values = uniforms([rollout_key(0, 1, "a", i) for i in range(100)], 500)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < chi_square_999(9)
    correlation = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    assert abs(correlation) < 0.02
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02


def test_every_part_of_the_name_matters() -> None:
    names = ((0, 1, "a", 0), (1, 1, "a", 0), (0, 2, "a", 0), (0, 1, "b", 0), (0, 1, "a", 1), (0, "1 a", "", 0))
    keys = {rollout_key(*name) for name in names}
    assert len(keys) == 6


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


@pytest.mark.parametrize("strings", [STRINGS, *[(string,) for string in STRINGS[:3]]], ids=str)
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


@hypothesis_settings(max_examples=100, deadline=None)
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


def ends(strings: list[str], *token_ids: int) -> bool:
    return StopStrings(tokenizer(), strings).ends(list(token_ids))


def test_a_string_ends_a_response_with_the_token_that_completes_it() -> None:
    """'</think>' is one token of this tokenizer: 'x' and '</th' lie before and within it."""
    x, think = *tokens_of("x"), *tokens_of("</think>")
    assert ends(["x</th"], x, think) and not ends(["x</th"], x) and not ends(["x</th"], x, think, x)
    assert StopStrings(tokenizer(), ["x</th"]).cut([x, think]) == ""
    # A character of three bytes.
    assert [ends(["本"], *spelled("本")[:n]) for n in range(4)] == [False, False, False, True]
    # Models have more rows than their tokenizer has tokens: such ids add nothing to the text.
    first, second = spelled("ab")
    unknown = [len(tokenizer()) + 7] * 30
    assert (
        text_of(unknown) == "" and ends(["ab"], first, *unknown, second) and not ends(["ab"], first, second, *unknown)
    )
    assert not ends([], *tokens_of("</answer>"))


def test_every_token_has_the_bytes_it_decodes_to() -> None:
    stop = StopStrings(tokenizer(), [])
    for token in range(len(tokenizer())):
        assert stop._token_bytes(token).decode(errors="replace") == text_of([token])


def test_only_trailing_tokens_are_read() -> None:
    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            assert isinstance(index, int)
            self.num_read += 1
            return super().__getitem__(index)

    ids = Counted(spelled("z") * 5000)
    assert not StopStrings(tokenizer(), ["</answer>", "ab"]).ends(ids)
    assert ids.num_read == len("</answer>")


def test_the_text_is_cut_before_the_string_that_begins_first() -> None:
    stop = StopStrings(tokenizer(), ["b", "abc", "</answer>"])
    assert stop.cut([*tokens_of("xx a"), *tokens_of("b")]) == "xx a"
    assert stop.cut([*tokens_of("A"), *tokens_of("</answer>")]) == "A"
    assert StopStrings(tokenizer(), ["b"]).cut(spelled("abcb")) == "abc", "an earlier one stays"
    texts = {"xx abc": "xx ", "A</answer>\nb": "A", "nothing": "nothing"}
    assert {text: stop.before_first(text) for text in texts} == texts


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, of the tokens 'a' and 'b' only."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def words_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("make", "string", "message"),
    [
        (tokenizer, "", r"rollout\.stop_strings has an empty string.*remove it"),
        # Qwen's tokenizers compose characters: an e with a combining accent becomes one character.
        (tokenizer, "e\u0301", r"rollout\.stop_strings has 'e\u0301'.* decodes to '\u00e9'.*Write it as"),
        (small_tokenizer, "ac", r"has 'ac'.*decodes to 'a'.*or remove it"),
        (words_tokenizer, "ab", r"needs a byte-level tokenizer.*Use rollout\.stop_token_ids"),
    ],
)
def test_a_string_the_tokenizer_never_writes_is_refused(make: Any, string: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopStrings(make(), ["a", string])


def test_an_added_token_is_read_as_it_is_written() -> None:
    """Added tokens are not in the byte alphabet: a space in one is a space."""
    with_added = small_tokenizer()
    with_added.add_tokens(["日 b"])
    assert with_added.decode([0, 2]) == "a日 b"
    stop = StopStrings(with_added, ["a日 b"])
    assert stop.ends([0, 2]) and not stop.ends([1, 2])
