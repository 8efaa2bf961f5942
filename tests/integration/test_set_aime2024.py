"""AIME 2024 and AMC 2023 from published files to mean@4, pass@k and majority@4; whole numbers in odd spellings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.published import aime2024, amc2023
from tests.support.scored_sets import Prepared, Row, check_table, prepare, prompts

pytestmark = pytest.mark.matrix

# Gold answers 204, 25 ("025") and 0 ("000"), four outputs each. CPPO's rule (published) reads boxes, and
# LaTeX behind "final answer is" and the like.
AIME = [
    Row("60", r"Thus $\boxed{204}$.", ("204", 1), ("204", 1)),
    Row("60", "The answer is 204.", ("204", 1), (None, 0)),
    Row("60", "So it is $204$.", ("204", 1), (None, 0)),
    Row("60", "I do not know.", (None, 0), (None, 0)),
    Row("61", r"\boxed{025}", ("25", 1), ("025", 1)),
    Row("61", r"\boxed{25}", ("25", 1), ("25", 1)),
    Row("61", r"\boxed{52}", ("52", 0), ("52", 0)),
    Row("61", r"\boxed{52}", ("52", 0), ("52", 0)),
    Row("62", r"\boxed{000}", ("0", 1), ("000", 1)),
    Row("62", r"\boxed{0}", ("0", 1), ("0", 1)),
    Row("62", "", (None, 0), (None, 0)),
    Row("62", r"\boxed{1}", ("1", 0), ("1", 0)),
]
# Gold answers 27 (27.0 in the file), -1 (-1.0), 3159 (3159.0) and 4. Qwen2.5-Math: a hundredth of the gold is right.
AMC = [
    Row("0", r"\boxed{0.27}", ("0.27", 0), ("0.27", 1)),
    Row("1", "So $a_{2023} = -1$.", ("-1", 1), ("-1", 1)),
    Row("2", "The answer is 3,159.", ("3159", 1), ("3,159", 1)),
    Row("test-5", r"First 5. Wait, that counts one twice: \boxed{4.0}", ("4", 1), ("4", 1)),
]


@pytest.fixture(scope="module")
def aime(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("aime2024", tmp_path_factory.mktemp("aime"), aime2024.CASES["HuggingFaceH4"])


def test_four_answers_are_sampled_to_each(aime: Prepared, tmp_path: Path) -> None:
    rows = prompts(tmp_path, aime, "aime2024/cppo")
    assert {name: row["user"] for name, row in rows.items()} == {
        "60": "How long is her walk?",
        "61": "What is $xy$?",
        "62": "What is the remainder?",
    }
    settings = rows["61"]["settings"]
    sampling = {key: settings["sampling"][key] for key in ("temperature", "top_p", "num_generations")}
    assert sampling == {"temperature": 0.6, "top_p": 0.95, "num_generations": 4}
    assert settings["max_new_tokens"] == 3072
    alone = prompts(tmp_path, aime, "aime2024/lmms")["61"]
    assert (alone["system"], alone["user"]) == ("", "What is $xy$?")


def test_outputs_and_figures_of_aime(aime: Prepared, tmp_path: Path) -> None:
    ours, published = check_table(tmp_path, aime, AIME, "aime2024/cppo")
    # Right of four: 3, 2, 2. mean@4 = (3/4 + 2/4 + 2/4) / 3 = 7/12.
    assert ours.counts == (3, 3, 2, 0, 0)
    assert ours.row["accuracy"] == pytest.approx(7 / 12)
    assert ours.figure("mean@4") == round(7 / 12, 6) and ours.figure("pass@4") == 1.0
    # Votes: 204 three times; 25 and 52 twice each, which share; 0 twice against 1 once.
    assert ours.figure("majority@4") == round((1 + 0.5 + 1) / 3, 6)
    # Of two drawn none is right with chance C(1,2)/C(4,2) = 0, C(2,2)/C(4,2) = 1/6, 1/6.
    assert ours.row["pass_at_k"]["2"] == pytest.approx((1 + 5 / 6 + 5 / 6) / 3)
    # Published: 1, 2, 2 of four. Three outputs to the first have no box, so 204 has the only vote there. The rule has
    # answers as they are written: 025 and 25 have one vote each against two of 52; 000, 0 and 1 share.
    assert published.row["accuracy"] == pytest.approx(5 / 12) and published.figure("pass@4") == 1.0
    assert published.figure("majority@4") == round((1 + 0 + 2 / 3) / 3, 6)


def test_the_copy_that_repeats_each_problem_counts_it_once(tmp_path: Path) -> None:
    case = aime2024.CASES["BytedTsinghua-SIA"]
    rows = prompts(tmp_path, prepare("aime2024", tmp_path, case), "aime2024/cppo")
    assert [(name, row["user"]) for name, row in rows.items()] == [
        ("aime-2024-1", "Walk?"),
        ("aime-2024-3", "Sum?"),
        ("aime-2024-96", "Sum?"),
    ]


def test_outputs_and_figures_of_amc(tmp_path: Path) -> None:
    amc = prepare("amc2023", tmp_path, amc2023.CASES["Qwen2.5-Math, the repository"])
    asked = prompts(tmp_path, amc, "amc2023/cppo")
    assert asked["1"]["user"] == "What is $a_{2023}?$" and asked["1"]["settings"]["max_new_tokens"] == 3072
    ours, published = check_table(tmp_path, amc, AMC, "amc2023/qwen2_5_math")
    assert (ours.row["accuracy"], published.row["accuracy"]) == (3 / 4, 1.0)
    assert ours.counts == published.counts == (4, 4, 0, 0, 0)
