"""Each medium is looked at once: over questions, runs and kills, until its file changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.media_check import ProbedMedia, probe_all
from data_pipelines.engine.resume import MediaBook
from data_pipelines.engine.splits import Assigned, Repeats, Splitter
from tests.support.frame_folders import coloured, write_folder
from tests.support.tiny_media import write_media
from vlm_pg.data.dedup import Ledger
from vlm_pg.errors import SampleError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef, Sample


def sample(number: int, *media: MediaRef, answer: str = "7", question: str = "How many?") -> Sample:
    return Sample(str(number), question, media, (), answer, "numerical", "made-up", "made-up", where=f"a:{number}")


def verdict(number: int, *media: MediaRef, split: str = "train") -> Verdict:
    paths = tuple(ref.path for ref in media)
    return Verdict(split, sample(number, *media), keys=paths)  # type: ignore[arg-type]


def video(name: str, **part: float) -> MediaRef:
    return MediaRef("video", name, **part)  # type: ignore[arg-type]


class Counting(MediaLoader):
    """Decodes in this process, and remembers what it was asked for. ``ends_after``: then it is killed."""

    def __init__(self, root: Path, ends_after: int = 1_000):
        super().__init__(MediaSettings(workers=0), root)
        self.asked: list[MediaRef] = []
        self._ends_after = ends_after

    def probe(self, ref: MediaRef, decode: bool = False) -> Future[MediaFacts] | SampleError:
        if len(self.asked) == self._ends_after:
            raise KeyboardInterrupt
        self.asked.append(ref)
        return super().probe(ref, decode)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(8):
        write_media(tmp_path / f"{number}.mp4", number)
    return tmp_path


def look(root: Path, verdicts: Sequence[Verdict], ends_after: int = 1_000) -> tuple[list[MediaRef], list[Verdict]]:
    loader = Counting(root, ends_after)
    with closing(MediaBook(root / "book.sqlite", root)) as book:
        probe_all(verdicts, book, loader, decode=False)
        return loader.asked, list(ProbedMedia(book).with_facts(verdicts))


def test_each_file_and_part_is_looked_at_once(root: Path) -> None:
    clip = video("0.mp4", start=1.0, end=9.0)
    wanted = [verdict(1, video("0.mp4")), verdict(2, video("./0.mp4"), video("1.mp4")), verdict(3, clip)]
    wanted += [verdict(4, clip), Verdict("train", skipped="source x")]
    asked, known = look(root, wanted)
    assert asked == [video("0.mp4"), video("1.mp4"), clip]
    first, second, third = (one.facts for one in known[:3])
    assert first[0] == second[0] and first[0].content == third[0].content != second[1].content
    assert first[0].seconds == third[0].seconds == pytest.approx(30) and third[0].frames == 16
    assert look(root, wanted)[0] == []


def test_what_a_killed_run_knew_is_not_asked_again(root: Path) -> None:
    wanted = [verdict(number, video(f"{number}.mp4")) for number in range(8)]
    with pytest.raises(KeyboardInterrupt):
        look(root, wanted, ends_after=5)
    asked, known = look(root, wanted)
    # With one file at a time it is asked for up to four before the first is written down.
    assert {ref.path for ref in asked} <= {f"{number}.mp4" for number in range(4, 8)} and len(asked) >= 3
    assert all(one.facts for one in known)


def test_a_file_that_changed_is_looked_at_again(root: Path) -> None:
    wanted = [verdict(number, video(f"{number}.mp4")) for number in range(4)] + [verdict(9, video("late.mp4"))]
    _, known = look(root, wanted)
    assert known[4].refused is not None and known[4].refused.reason == "missing_media"
    write_media(root / "2.mp4", 200)
    write_media(root / "late.mp4", 300)
    state = (root / "1.mp4").stat()
    os.utime(root / "1.mp4", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    asked, changed = look(root, wanted)
    assert [ref.path for ref in asked] == ["1.mp4", "2.mp4", "late.mp4"]
    assert changed[1] == known[1] and changed[2].facts[0].content != known[2].facts[0].content
    assert changed[4].facts and changed[4].refused is None


def test_a_folder_is_looked_at_again_when_one_of_its_pictures_is_another(root: Path) -> None:
    write_folder(root / "a", [coloured(number) for number in range(4)])
    write_folder(root / "b", [coloured(number) for number in range(4)])
    wanted = [verdict(number, video(name, folder_fps=2.0)) for number, name in enumerate("ab")]
    _, known = look(root, wanted)
    assert known[0].facts == known[1].facts and known[0].facts[0].seconds == 2.0
    write_folder(root / "b", [coloured(9)], first=3)
    asked, changed = look(root, wanted)
    assert [ref.path for ref in asked] == ["b"]
    assert changed[0] == known[0] and changed[1].facts[0].content != known[1].facts[0].content


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0" + b"x" * 5000, b"x" * 300])
def test_a_damaged_book_begins_anew(root: Path, damage: bytes) -> None:
    wanted = [verdict(1, video("1.mp4"))]
    _, known = look(root, wanted)
    (root / "book.sqlite").write_bytes(damage)
    asked, again = look(root, wanted)
    assert len(asked) == 1 and again == known


def damaged(path: Path, how: str) -> None:
    """A leaf of the table's tree zeroed, or two exchanged: the file opens, and what stands in it is still counted."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    # A page's first byte says what it is: 13 is a leaf of a table. That of the schema is on page 1, behind a header.
    first, second, *_ = [start for start in range(size, len(content), size) if content[start] == 13]
    one, other = content[first : first + size], content[second : second + size]
    content[first : first + size] = other if how == "exchanged" else bytes(size)
    content[second : second + size] = one if how == "exchanged" else other
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["zeroed", "exchanged"])
def test_a_book_damaged_inside_is_noticed_when_it_is_opened(tmp_path: Path, how: str) -> None:
    refs = [video(f"{number}.mp4") for number in range(200)]
    with closing(MediaBook(tmp_path / "book.sqlite", tmp_path)) as book:
        book.want(refs)
        for ref in refs:
            book.write(ref, "-", facts("content"))
        assert book.counts() == (200, 200)
    damaged(tmp_path / "book.sqlite", how)
    with closing(MediaBook(tmp_path / "book.sqlite", tmp_path)) as book:
        assert book.counts() == (0, 0)
        book.want(refs)
        assert list(book.unknown()) == refs


def test_a_medium_that_cannot_be_used_refuses_its_questions_alone(root: Path) -> None:
    (root / "bad.mp4").write_bytes(b"\0")
    wanted = [verdict(1, video("1.mp4")), verdict(2, video("1.mp4"), video("bad.mp4"))]
    _, (good, bad) = look(root, wanted)
    assert good.sample is not None and bad.sample is None and bad.refused is not None
    assert (bad.refused.reason, bad.refused.where) == ("corrupt_media", "a:2") and bad.keys == ("1.mp4", "bad.mp4")


def facts(content: str) -> MediaFacts:
    return MediaFacts(content, 1.0, 4, 28, 28, 2)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def test_equal_content_is_on_one_side_whatever_it_is_called(ledger: Ledger) -> None:
    known = [
        Verdict("train", sample(number), keys=(f"{number}.mp4",), facts=(facts(f"content {number % 50}"),))
        for number in range(200)
    ]
    sides: dict[int, set[str]] = {}
    for placed in Splitter(ledger, eval_share=0.5, seed=0).assign(known):
        assert isinstance(placed, Assigned)
        sides.setdefault(int(placed.sample.sample_id) % 50, set()).add(placed.split)
    assert all(len(split) == 1 for split in sides.values()) and 10 < sum("eval" in one for one in sides.values()) < 40


def test_what_evaluation_asks_about_is_not_trained_on_by_name_or_content(ledger: Ledger) -> None:
    splitter = Splitter(ledger, eval_share=0.0, seed=0)
    refused = Verdict("eval", skipped="x", keys=("gone.mp4",))
    splitter.note([Verdict("eval", sample(1), keys=("1.mp4",), facts=(facts("a"),)), refused])
    train = [("2.mp4", "a"), ("gone.mp4", "b"), ("3.mp4", "c")]
    placed = list(
        splitter.assign(Verdict("train", sample(9 + n), keys=(k,), facts=(facts(c),)) for n, (k, c) in enumerate(train))
    )
    assert placed[:2] == ["also in the evaluation file"] * 2 and isinstance(placed[2], Assigned)


def test_a_question_repeats_another_by_all_that_is_asked(ledger: Ledger) -> None:
    repeats = Repeats(ledger)
    clip = video("1.mp4", start=1.0, end=2.0)
    assert repeats.of(sample(1, video("1.mp4")), [facts("a")]) is None
    for other in (
        (sample(2, clip), [facts("a")]),
        (sample(3, video("1.mp4")), [facts("b")]),
        (sample(4, video("1.mp4"), question="Who?"), [facts("a")]),
        (sample(5), []),
    ):
        assert repeats.of(*other) is None
    same = repeats.of(sample(6, video("2.mp4")), [facts("a")])
    wrong = repeats.of(sample(7, video("3.mp4"), answer="8"), [facts("a")])
    assert same is not None and (same.first, same.answers, same.where) == ("1", "same", "a:6")
    assert wrong is not None and (wrong.first, wrong.answers) == ("1", "other")
    text = repeats.of(sample(8), [])
    assert text is not None and text.first == "5"
