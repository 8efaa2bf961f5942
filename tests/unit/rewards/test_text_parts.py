"""Length, repetition and language: small formulas on the whole response."""

from __future__ import annotations

import pytest

from vlm_pg.rewards.language import language_reward
from vlm_pg.rewards.length import length_reward
from vlm_pg.rewards.repetition import repetition_reward
from vlm_pg.rewards.settings import LanguageSettings, LengthSettings, RepetitionSettings


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (50, 0.5), (99, 0.99), (100, 1.0), (200, 1.0), (201, 0.995), (300, 0.5), (400, 0.0), (9999, 0.0)],
)
def test_length_falls_on_both_sides(num_tokens: int, value: float) -> None:
    settings = LengthSettings(min_tokens=100, max_tokens=200)
    assert length_reward(num_tokens, settings) == pytest.approx(value, abs=1e-12)


def test_no_lower_length_by_default() -> None:
    assert length_reward(0, LengthSettings()) == 1.0


@pytest.mark.parametrize(
    ("text", "ngram", "value"),
    [
        ("a b c d e", 2, 1.0),
        ("a b a b a b", 2, 2 / 5),  # ab, ba, ab, ba, ab
        ("The the THE", 1, 1 / 3),
        ("a b\n\tc  a b c", 3, 3 / 4),  # abc, bca, cab, abc
        ("a b c", 3, 1.0),
        ("a a", 3, 1.0),  # shorter than one n-gram
        ("", 1, 1.0),
        ("红色红色红色", 2, 2 / 5),
        ("赤い 赤い", 2, 2 / 3),  # 赤い, い赤, 赤い
        ("สวัสดีสวัสดี", 6, 6 / 7),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(text: str, ngram: int, value: float) -> None:
    assert repetition_reward(text, RepetitionSettings(ngram=ngram)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "script", "value"),
    [
        ("<think>abc</think><answer>5</answer>", "latin", 1.0),
        ("<think>红色</think><answer>红</answer>", "han", 1.0),  # the tags are not Latin text
        ("红a", "han", 0.5),
        ("Größe, œuvre, ａｂ", "latin", 1.0),
        ("赤いバラ 々", "japanese", 1.0),
        ("赤いバ", "han", 1 / 3),
        ("빨간색", "hangul", 1.0),
        ("красный red", "cyrillic", 0.7),
        ("κόκκινο", "greek", 1.0),
        ("أحمر", "arabic", 1.0),
        ("אדום", "hebrew", 1.0),
        ("लाल", "devanagari", 1.0),
        ("red", "greek", 0.0),
        ("12 + 3 = 15 √ ½", "latin", 1.0),
        ("", "latin", 1.0),
    ],
)
def test_language_is_the_share_of_letters_in_its_script(text: str, script: str, value: float) -> None:
    settings = LanguageSettings.model_validate({"script": script})
    assert language_reward(text, settings) == pytest.approx(value, abs=1e-12)
