"""Repeated questions, and evaluation on what was trained on: by the run's own reward, among records that it uses."""

from __future__ import annotations

from typing import Any

from tests.support.checking import Folder, about, record

WORTH = """
def first_letter(response, answer):
    return float(response.split("<answer>")[1][:1].lower() == answer[:1].lower())
"""


def question(number: int, kind: str, answer: str, *options: str, **changes: Any) -> dict[str, Any]:
    solution = f"<answer>{answer}</answer>"
    fields = {"problem": "What is it?", "problem_type": kind, "options": list(options), "solution": solution}
    return record(number, **fields | changes)


PAIRS = [
    (("numerical", "3"), ("numerical", "3.0"), True),
    (("numerical", "3"), ("numerical", "4"), False),
    (("free-form", "Paris"), ("free-form", "paris"), True),
    (("free-form", "Paris"), ("free-form", "Rome"), False),
    # one earns something from the other, and not all
    (("free-form", "a red lorry"), ("free-form", "a blue lorry"), False),
    (("mathematics", "3/2"), ("mathematics", r"\frac{3}{2}"), True),
    (("mathematics", "3/2"), ("mathematics", r"\frac{2}{3}"), False),
    (("regression", "3"), ("regression", "3.00"), True),
    (("OCR", "Open"), ("OCR", "open"), False),
    (("multiple choice", "A", "A. a", "B. b"), ("multiple choice", "A. a", "A. a", "B. b"), True),
    (("multiple select", "A, B", "2", "3", "4"), ("multiple select", "B,A", "2", "3", "4"), True),
    (("multiple select", "A, B", "2", "3", "4"), ("multiple select", "A", "2", "3", "4"), False),
    # a gold answer has to do for both kinds
    (("numerical", "3"), ("exact", "3"), True),
    (("free-form", "blue"), ("OCR", "Blue"), False),
    (("OCR", "Blue"), ("free-form", "blue"), False),
    (("time span", "1 to 2.5"), ("time span", "[1.0, 2.5]"), True),
]  # fmt: skip


def test_gold_answers_are_compared_by_the_reward(folder: Folder) -> None:
    records, expected = [], dict[str, list[str]]()
    for number, (first, second, same) in enumerate(PAIRS):
        records += [
            question(2 * number + more, kind, *answer, problem=f"What is it {number}?")
            for more, (kind, *answer) in ((1, first), (2, second))
        ]
        line = 2 * number + 2
        expected.setdefault("duplicate_question?" if same else "contradictory_answer", []).append(
            f"train.jsonl:{line} {line}"
        )
    assert folder.check(records) == (1, expected)


def test_gold_answers_are_compared_by_what_the_run_rewards(folder: Folder) -> None:
    pair = [question(1, "exact", "Open"), question(2, "exact", "Oslo")]
    (folder.path / "own.py").write_text(WORTH)
    functions = [{"function": f"{folder.path / 'own.py'}:first_letter", "weight": 1.0}]
    assert list(folder.check(pair)[1]) == ["contradictory_answer"]
    own = {"functions": functions, "accuracy_weight": 0.0}
    assert list(folder.check(pair, reward=own)[1]) == ["duplicate_question?"]
    assert list(folder.check(pair, reward={"functions": functions})[1]) == ["contradictory_answer"]
    # beside accuracy a function does not decide
    halves = [question(1, "numerical", "0.5"), question(2, "numerical", ".5")]
    assert list(folder.check(halves, reward={"functions": functions})[1]) == ["duplicate_question?"]
    assert list(folder.check(halves, reward=own)[1]) == ["contradictory_answer"]
    # where nothing that counts reads answers, accuracy does
    shape = {"accuracy_weight": 0.0, "length": {"weight": 1.0}}
    assert list(folder.check(pair, reward=shape)[1]) == ["contradictory_answer"]
    reading = [question(1, "OCR", "Open"), question(2, "OCR", "open")]
    assert list(folder.check(reading, reward={"ocr_case_sensitive": False})[1]) == ["duplicate_question?"]


def test_a_gold_answer_that_earns_nothing_is_that_of_its_copy(folder: Folder) -> None:
    code, found = folder.check([question(1, "numerical", "many"), question(2, "numerical", "many")])
    assert (code, set(found)) == (1, {"unscorable_gold_answer", "duplicate_question?"})


def test_what_training_refuses_is_not_trained_on(folder: Folder) -> None:
    """Nor a repeated question; what it keeps, although it should not, is."""
    held = [about(1, "again.mov"), record(2, problem="Why? " * 300)]
    long = [about(1, "video_90.mov", problem="Which? " * 300), record(2, problem="Why? " * 300)]
    limit = {"max_prompt_tokens": 200}
    code, found = folder.check([*long, record(3, problem="Why? " * 300)], held, prompt=limit)
    assert (code, list(found)) == (1, ["prompt_too_long"]) and len(found["prompt_too_long"]) == 4
    # the same video in a record that fits; one whose other medium is lost is refused as well
    half = about(4, "c.png") | {"path": ["c.png", "no.png"]}
    code, found = folder.check([*long, half, about(5, "video_90.mov")], [held[0], about(3, "c.png")], prompt=limit)
    assert found.pop("prompt_too_long") and found.pop("missing_media")
    assert found == {"media_trained_on": ["data.eval.held, held.jsonl:1 1"]}
    used = [about(6, "c.png", options=["A. red", "B. Red"]), about(7, "video_90.mov", options=["A. red", "B. Red"])]
    code, found = folder.check(used, [held[0], about(3, "c.png")], prompt=limit)
    assert set(found) == {"equal_options", "media_trained_on"}
    assert len(found["media_trained_on"]) == 2


def test_evaluation_sets_are_compared_with_training_alone(folder: Folder) -> None:
    """Two of them may ask the same question; a medium that stands twice in a record is named once."""
    both = {name: str(folder.path / "held.jsonl") for name in ("one", "two")}
    assert folder.check((), [record(1)], data={"eval": both}) == (0, {})
    _, found = folder.check([about(1, "a.png")], [about(2, "b.png") | {"path": ["a.png", "b.png"]}])
    assert found == {"media_trained_on": ["data.eval.held, held.jsonl:1 2"]}
