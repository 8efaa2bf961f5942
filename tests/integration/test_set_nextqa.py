"""NExT-QA from its CSV files to its figures, small and made here, and the whole real list of questions."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from pathlib import Path

import pytest

from tests.support.published.case import Published, media
from tests.support.scored_sets import Prepared, Row, Says, check_table, prepare, prompts, score
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix

# The gold answer is a place from 0. Three have equal options; in the last of these the gold text is one of them.
VAL = """\
video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4
11,600,64,48,why did the boy clap,4,0,CW,to cheer,to dance,"tired, and sad",run,for fun
11,600,64,48,what sits on the floor,2,1,CH,a dog,a bird,a cat on a mat,a fish,a horse
11,600,64,48,what does he do at the end,2,2,TN,wave,sit,stand up,jump,"say ""bye"" twice"
22,600,64,48,what does he do first,1,0,TP,wave,sit,stand up,jump,cry
22,600,64,48,how does it begin,1,1,TC,hit,strum,hit,blow,pat
22,600,64,48,how does it go on,3,2,TC,hit,strum,hit,blow,pat
22,600,64,48,how does it end,0,3,TC,hit,strum,hit,blow,pat
33,600,64,48,how many people are there,0,0,DC,two,one,five,nine,ten
33,600,64,48,where is it,3,1,DL,park,room,beach,street,pool
33,600,64,48,what is in the back,1,2,DO,tree,house,hill,car,road
33,600,64,48,what moves,0,3,DO,ball,house,hill,car,road
44,600,64,48,what moves,0,0,DO,ball,house,hill,car,road
"""
MAP = {"11": "0001/11", "22": "0002/22", "33": "0003/33", "44": "0004/44"}
CASE = Published(
    {
        "val.csv": VAL,
        "map_vid_vidorID.json": MAP,
        **media("NExTVideo/0001/11.mp4", "NExTVideo/0002/22.mp4", "NExTVideo/0003/33.mp4"),
    },
    refused=[("val.csv:8", "22_3", "bad_options"), ("val.csv:13", "44_0", "missing_media")],
)


def drawn(name: str, output: str, gold: str) -> Says:
    """What stands for lmms-eval's random option: the first 8 bytes of a hash name one of five letters."""
    key = f"nextqa/lmms\0{name}\0{output}".encode()
    letter = "ABCDE"[int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 5]
    return letter, float(letter == gold)


CANNOT = "I cannot tell from these frames."
# Published (MMMU's parser): "(A)" goes before "A ", and that before "A."; then an option's text in more than 5 words;
# else an option is drawn.
TABLE = [
    Row("11_0", "E", ("E", 1), ("E", 1)),
    Row("11_1", "C. A cat on a mat", ("C", 1), ("A", 0)),
    Row("11_2", "First I thought B. Wait, he gets up again: the answer is (C).", ("C", 1), ("C", 1)),
    Row("22_0", "<think>It may be (A).</think>\n\nB. sit", ("B", 1), ("A", 0)),
    Row("22_1", "strum", ("B", 1), drawn("22_1", "strum", "B")),
    Row("22_2", "hit", (None, 0), drawn("22_2", "hit", "D")),
    Row("33_0", "There is a man and a dog, so the answer is A: two.", ("A", 1), ("A", 1)),
    Row("33_1", CANNOT, (None, 0), drawn("33_1", CANNOT, "D")),
    Row("33_2", "答案是C。", ("C", 0), drawn("33_2", "答案是C。", "B")),
]


@pytest.fixture(scope="module")
def nextqa(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("nextqa", tmp_path_factory.mktemp("nextqa"), CASE)


def test_lmms_asks_with_the_options_alone_and_32_frames(nextqa: Prepared, tmp_path: Path) -> None:
    """600 frames, 2 a second: places round(599 * i / 31). 48 x 64 grows to at least 256 * 28 * 28 pixels: 392 x 532."""
    rows = prompts(tmp_path, nextqa, "nextqa/lmms")
    assert list(rows) == [*(row.name for row in TABLE), "33_3"]
    row = rows["11_0"]
    words = "why did the boy clap\nA. to cheer\nB. to dance\nC. tired, and sad\nD. run\nE. for fun"
    assert (row["system"], row["user"], row["answer_prefix"]) == ("You are a helpful assistant.", words, "")
    [medium] = row["media"]
    assert medium["path"] == "NExTVideo/0001/11.mp4"
    assert len(medium["frame_seconds"]) == 32 and medium["frame_seconds"][:2] == [0.0, 9.5]
    assert medium["frame_seconds"][-1] == 299.5
    assert (medium["height"], medium["width"]) == (392, 532)
    assert row["settings"]["sampling"]["temperature"] == 0.0 and row["settings"]["max_new_tokens"] == 1024
    # Where the question's own quotation marks stand, none are added.
    assert rows["11_2"]["user"].endswith('\nE. say "bye" twice')


def test_official_asks_at_2_frames_a_second(nextqa: Prepared, tmp_path: Path) -> None:
    """All 600 frames, within 768; 48 x 64 grows to at least 48 * 28 * 28 pixels: 168 x 224."""
    [medium] = prompts(tmp_path, nextqa, "nextqa/official")["33_0"]["media"]
    assert medium["frame_seconds"] == [number / 2 for number in range(600)]
    assert (medium["height"], medium["width"], medium["sampled_fps"]) == (168, 224, 2.0)


def test_outputs_and_figures(nextqa: Prepared, tmp_path: Path) -> None:
    ours, published = check_table(tmp_path, nextqa, TABLE, "nextqa/lmms")
    # 33_3 has no output, and is in no figure. Ours: 11_0, 11_1, 11_2, 22_0, 22_1, 33_0 of 9. Unread are 22_2 and 33_1.
    assert ours.counts == (10, 9, 2, 0, 1)
    assert ours.row["accuracy"] == pytest.approx(6 / 9)
    # TP counts as TN: 11_2 and 22_0.
    types = {"CH": (1.0, 1), "CW": (1.0, 1), "DC": (1.0, 1), "DL": (0.0, 1), "DO": (0.0, 1), "TC": (0.5, 2)}
    assert ours.group("type") == types | {"TN": (1.0, 2)}
    # C: 2 of 2. D: 1 of 3. T: 3 of 4.
    assert ours.group("kind") == {"C": (1.0, 2), "D": (0.333333, 3), "T": (0.75, 4)}
    assert {name: one["accuracy"] for name, one in ours.row["by_category"].items()}["TP"] == 1.0
    assert published.row["reader"] == "nextqa/lmms" and published.counts == (10, 9, 0, 0, 1)
    # Without those that are drawn: 11_0, 11_2 and 33_0 are right, 11_1 and 22_0 wrong.
    lucky = sum(row.published[1] or 0 for row in TABLE if row.name in ("22_1", "22_2", "33_1", "33_2"))
    assert published.row["accuracy"] == pytest.approx((3 + lucky) / 9)


def test_all_real_questions(data_dir: Path, tmp_path: Path) -> None:
    """Every gold answer scores 1, a second output to every third question 0; figures equal counts of the file's own."""
    path, out = data_dir / "nextqa_val.csv", tmp_path / "out"
    arguments = ["--eval", str(path), "--media-root", str(tmp_path), "--skip-media-check", "--out", str(out)]
    assert main(["prepare", "nextqa", *arguments]) == 0
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4996
    right, total = Counter[str](), Counter[str]()
    # Letter and text to our reader; letters alone to the published rule, which reads text at times.
    outputs: dict[str, dict[str, list[str]]] = {"ours": {}, "published": {}}
    expected: dict[str, list[float]] = {}
    for number, line in enumerate(lines):
        name, gold = f"{line['video']}_{line['qid']}", int(line["answer"])
        places = [gold] if number % 3 else [gold, (gold + 1) % 5]
        outputs["ours"][name] = [f"{'ABCDE'[place]}. {line[f'a{place}']}" for place in places]
        outputs["published"][name] = ["ABCDE"[place] for place in places]
        expected[name] = [1.0, 0.0][: len(places)]
        for group in (line["type"].replace("TP", "TN"), line["type"][0]):
            total[group] += 1
            right[group] += 2 // len(places)  # in halves
    for reader, texts in outputs.items():
        scored = score(tmp_path / reader, f"{out}:eval", texts, "nextqa/lmms", reader)
        found = {name: [one["score"] for one in line["outputs"]] for name, line in scored.answers.items()}
        assert found == expected
        assert scored.counts == (4996, 4996, 0, 0, 0)
        groups = {name: (round(right[name] / 2 / count, 6), count) for name, count in total.items()}
        assert {**scored.group("type"), **scored.group("kind")} == groups
        # Places 0, 3, ..., 4995 are half right.
        assert scored.row["accuracy"] == pytest.approx((4996 - 1666 / 2) / 4996)
