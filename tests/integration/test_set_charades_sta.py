"""Charades-STA from its lines, and from a table of 16-bit floats, to mIoU and R@1 at three thresholds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.published.case import Published
from tests.support.published.charades_sta import SHARD, halves, lengths
from tests.support.scored_sets import Prepared, Row, check_table, prepare, prompts
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

LINES = """\
0A8CF 1.5 12.0##a person cooks.
3MSZA 24.3 30.4##person turn a light on.
3MSZA 0.0 10.0##person sits.
3MSZA 10.0 20.0##person stands.
0A8CF 11.5 12.0##a person eats.
GONE1 1.5 12##a person cooks.
"""
VIDEOS = {f"Charades_v1_480/{name}.mp4": mp4(place) for place, name in enumerate(("0A8CF", "3MSZA"))}
CASE = Published(
    {"charades_sta_test.txt": LINES, "Charades_v1_test.csv": lengths(**{"0A8CF": "11.17", "3MSZA": "30.96"}), **VIDEOS},
    refused=[
        ("charades_sta_test.txt:5", "charades_sta_test-5", "bad_time_span"),
        ("charades_sta_test.txt:6", "charades_sta_test-6", "missing_media"),
    ],
)
COOKS, LIGHT, SITS, STANDS = (f"charades_sta_test-{number}" for number in range(1, 5))
# The first span ends with its video, at 11.17. Published (lmms-eval): the first "a - b", "to" being "-"; reversed ones
# are turned round.
TABLE = [
    Row(COOKS, "The event happens in the 1.5 - 11.17 seconds.", ("[1.5, 11.17]", 1), ("[1.5, 11.17]", 1)),
    # 9.67 shared of 1.5 to 30.
    Row(COOKS, "From 1.5 to 30 seconds.", ("[1.5, 30]", 9.67 / 28.5), ("[1.5, 30]", 9.67 / 28.5)),
    Row(LIGHT, "It starts at 24.3 seconds and ends at 30.4 seconds.", ("[24.3, 30.4]", 1), (None, 0)),
    Row(LIGHT, "<think>perhaps 0 - 5</think> 24.3 - 30.4 s", ("[24.3, 30.4]", 1), ("[0, 5]", 0)),
    # Exactly at the thresholds, where "at least" counts.
    Row(SITS, "0 - 5", ("[0, 5]", 0.5), ("[0, 5]", 0.5)),
    Row(SITS, "0.0 to 7.0", ("[0, 7]", 0.7), ("[0, 7]", 0.7)),
    Row(STANDS, "I cannot see that.", (None, 0), (None, 0)),
    Row(STANDS, '{"start": 10.0, "end": 20.0}', ("[10, 20]", 1), (None, 0)),
]


@pytest.fixture(scope="module")
def charades(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("charades_sta", tmp_path_factory.mktemp("charades"), CASE)


def test_questions_are_asked_as_published(charades: Prepared, tmp_path: Path) -> None:
    """Descriptions end in a dot already, and "seonds" is in the original."""
    rows = prompts(tmp_path, charades, "charades_sta/lmms")
    assert list(rows) == [COOKS, LIGHT, SITS, STANDS]
    words = rows[LIGHT]["user"]
    assert (
        "in the 24.3 - 30.4 seonds. Now I will give you the textual sentence: person turn a light on.. Please" in words
    )
    assert rows[LIGHT]["settings"]["max_new_tokens"] == 50 and len(rows[LIGHT]["media"][0]["frame_seconds"]) == 32


def test_time_r1_asks_at_2_frames_a_second(charades: Prepared, tmp_path: Path) -> None:
    """All 60 frames of half a minute; 48 x 64 grows to at least 16 * 28 * 28 pixels: 112 x 140."""
    row = prompts(tmp_path, charades, "charades_sta/time_r1")[LIGHT]
    assert row["user"].startswith(
        'To accurately pinpoint the event "person turn a light on." in the video, determine the'
    )
    [medium] = row["media"]
    assert medium["frame_seconds"] == [number / 2 for number in range(60)]
    assert (medium["height"], medium["width"]) == (112, 140)


def test_outputs_and_figures(charades: Prepared, tmp_path: Path) -> None:
    ours, published = check_table(tmp_path, charades, TABLE, "charades_sta/lmms")
    beyond = 9.67 / 28.5  # 0.339
    # Means of two outputs each, then of four queries.
    assert ours.figure("mIoU") == round(100 * ((1 + beyond) / 2 + 1 + 0.6 + 0.5) / 4, 6)
    assert ours.figure("R@1 IoU>=0.3") == 100 * (1 + 1 + 1 + 0.5) / 4
    assert ours.figure("R@1 IoU>=0.5") == 100 * (0.5 + 1 + 1 + 0.5) / 4
    assert ours.figure("R@1 IoU>=0.7") == 100 * (0.5 + 1 + 0.5 + 0.5) / 4
    assert ours.row["accuracy"] == pytest.approx(ours.row["figures"]["mIoU"]["value"] / 100)
    assert ours.counts == (4, 4, 1, 0, 0)
    assert published.figure("mIoU") == round(100 * ((1 + beyond) / 2 + 0 + 0.6 + 0) / 4, 6)
    assert [published.figure(f"R@1 IoU>={least}") for least in (0.3, 0.5, 0.7)] == [50.0, 37.5, 25.0]
    assert published.counts == (4, 4, 3, 0, 0)


def test_times_of_16_bits_are_the_published_ones_again(tmp_path: Path) -> None:
    """24.3 is stored as 24.296875: the published span scores 1, at no loss of .0004."""
    table = halves(("3MSZA.mp4", "person turn a light on.", [24.3, 30.4]))
    half = prepare("charades_sta", tmp_path, Published({f"data/{SHARD}": table, **VIDEOS}))
    rows = [Row("data-test-1", "24.3 - 30.4", ("[24.3, 30.4]", 1), ("[24.3, 30.4]", 1))]
    ours, _ = check_table(tmp_path, half, rows, "charades_sta/lmms")
    assert ours.figure("mIoU") == ours.figure("R@1 IoU>=0.7") == 100.0
