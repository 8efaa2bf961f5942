"""A killed run continues from its parts and media facts as far as they hold: media, parts or files may change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from data_pipelines import generic, gsm8k, star, video_r1, vsi
from data_pipelines.engine import command, judging
from data_pipelines.engine.judging import Judge, Part
from data_pipelines.engine.media_check import ProbedMedia, probe_all
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.resume import MediaBook, Spool, StaleVerdicts, Verdict
from data_pipelines.engine.splits import Assigned, Repeats, Splitter
from tests.support.frame_folders import coloured, write_folder
from tests.support.pipeline_rows import empty_files
from tests.support.tiny_media import write_media
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError, SampleError, VlmPgError
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import BadSample, MediaRef, Sample

Main = Callable[[list[str]], int]
COUNT = 6


def picture(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (56, 56), (number * 40 % 256, 5, 9)).save(path)


def questions(path: Path) -> Path:
    rows = [
        {"problem_id": n, "problem": f"Which {n}?", "data_type": "image", "problem_type": "exact", "options": []}
        | {"process": "", "solution": "<answer>red</answer>", "path": f"{n}.png", "data_source": "made-up"}
        for n in range(COUNT)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "PART_ROWS", 20)
        yield


def sums(path: Path, count: int = 50) -> Path:
    rows = ({"question": f"How much is {n}?", "answer": f"#### {n}" if n % 7 else "none"} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def killed(main: Main, arguments: list[str]) -> None:
    """After all rows were judged and all media looked at."""

    def died(*some: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "write_all", died)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != "manifest.json"}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that are judged."""
    numbers: list[int] = []
    judge = Judge.judge

    def counted(self: Judge, part: Part) -> list[Verdict]:
        numbers.append(part.number)
        return judge(self, part)

    monkeypatch.setattr(Judge, "judge", counted)
    return numbers


def map_arguments(folder: Path) -> list[str]:
    """Of the questions by a map that names two folders of media."""
    fields = {name: name for name in ("problem", "data_type", "problem_type", "path")}
    described = {"fields": {**fields, "answer": {"field": "solution", "given_as": "tagged"}}, "name": "mine"}
    (folder / "map.yaml").write_text(json.dumps({**described, "media_folders": ["old", "new"]}))
    files = ["--train", str(questions(folder / "rows.jsonl")), "--media-root", str(folder / "media")]
    return ["--map", str(folder / "map.yaml"), *files, "--workers", "1", "--eval-share", "0"]


@pytest.mark.parametrize(
    ("change", "more"), [("fetched", []), ("fetched", ["--skip-media-check"]), ("moved", ["--skip-media-check"])]
)
def test_media_that_were_fetched_or_moved_since(tmp_path: Path, change: str, more: list[str]) -> None:
    root, out = tmp_path / "media", tmp_path / "out"
    arguments = [*map_arguments(tmp_path), *more, "--out", str(out)]
    for number in range(COUNT if change == "moved" else COUNT - 1):
        picture(root / "old" / f"{number}.png", number)
    (root / "new").mkdir()
    killed(generic.main, arguments)
    if change == "moved":
        (root / f"old/{COUNT - 1}.png").rename(root / f"new/{COUNT - 1}.png")
    else:
        picture(root / f"new/{COUNT - 1}.png", COUNT - 1)
    assert generic.main(arguments) == 0
    paths = [sample.media[0].path for sample in open_records(Path(f"{out}:train"))[0]]
    assert paths == [*(f"old/{number}.png" for number in range(COUNT - 1)), f"new/{COUNT - 1}.png"]


def test_a_name_that_is_plain_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that led out of the root is a file now."""
    root, out = tmp_path / "media", tmp_path / "out"
    for number in range(COUNT):
        picture(root / f"{number}.png", number)
    outside = tmp_path / "outside.png"
    (root / "1.png").rename(outside)
    (root / "1.png").symlink_to(outside)
    arguments = ["--train", str(questions(tmp_path / "rows.jsonl")), "--media-root", str(root), "--out", str(out)]
    arguments += ["--eval-share", "0", "--workers", "1"]
    killed(video_r1.main, arguments)
    (root / "1.png").unlink()
    shutil.copy(outside, root / "1.png")
    capsys.readouterr()
    assert video_r1.main(arguments) == 0
    assert "1 part(s) of the run before are judged again" in capsys.readouterr().out
    assert json.loads((out / "report.json").read_text())["train"] == COUNT


def test_only_verdicts_that_depend_on_files_can_be_stale(tmp_path: Path) -> None:
    is_stale = StaleVerdicts(MediaFinder(tmp_path, video_r1.VIDEO_R1))
    for reason in ("missing_media", "ambiguous_media", "outside_root"):
        assert is_stale(Verdict("train", refused=BadSample("1", reason, "why", "rows:1")))
    for reason in ("no_gold_answer", "unsupported_media", "corrupt_media", "remote_media"):
        assert not is_stale(Verdict("train", refused=BadSample("1", reason, "why", "rows:1")))
    picture(tmp_path / "here.png", 1)
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder").mkdir()
    for path, subtitles, doubtful in (
        ("./here.png", "", False),
        (f"file://{tmp_path}/here.png", "", False),
        ("https://host/there.png", "", False),
        ("there.png", "", True),
        ("here.png", "there.srt", True),
        ("x" * 5_000, "", True),
        ("empty.png", "", True),
        ("folder", "", True),
    ):
        ref = MediaRef("video", path, subtitles=subtitles)
        assert is_stale(Verdict("train", Sample("1", "a", (ref,), (), "x", "exact", "y", "z"))) == doubtful, ref
    for path, doubtful in (("folder", False), ("here.png", True), ("there", True)):
        ref = MediaRef("video", path, folder_fps=3.0)
        assert is_stale(Verdict("train", Sample("1", "a", (ref,), (), "x", "exact", "y", "z"))) == doubtful, ref
    assert not is_stale(Verdict("train", skipped="data type text"))
    bad = BadSample("1", "no_gold_answer", "why", "rows:1")
    for name, keys, doubtful in (("here.png", ("x",), False), ("there.png", ("x",), True), ("there.png", (), False)):
        found = ((name, name, None, None),)
        assert is_stale(Verdict("train", refused=bad, keys=keys, found=found)) == doubtful


def test_a_verdict_is_stale_when_another_file_takes_precedence(tmp_path: Path) -> None:
    """Or that leaves it open which is meant: as a run says that begins now."""
    empty_files(tmp_path, "Charades/6H78U.mp4")
    finder = MediaFinder(tmp_path, star.STAR)
    assert finder.path_of("6H78U.mp4") == "Charades/6H78U.mp4"
    verdict = Verdict("train", skipped="source x", found=finder.take_found())
    assert not finder.take_found() and not StaleVerdicts(MediaFinder(tmp_path, star.STAR))(verdict)
    empty_files(tmp_path, "Charades_v1_480/6H78U.mp4")
    assert StaleVerdicts(MediaFinder(tmp_path, star.STAR))(verdict)
    empty_files(tmp_path, "set/rows.jsonl", "VSI-590K/a/1.mp4")
    finder = MediaFinder(tmp_path, vsi.VSI)
    finder.path_of("a/1.mp4", "VSI-590K", tmp_path / "set")
    verdict = Verdict("train", skipped="source x", found=finder.take_found())
    assert not StaleVerdicts(MediaFinder(tmp_path, vsi.VSI))(verdict)
    (tmp_path / "VSI-590K").rename(tmp_path / "vsi590k")
    assert StaleVerdicts(MediaFinder(tmp_path, vsi.VSI))(verdict)


def test_a_resumed_run_equals_a_fresh_one_after_media_were_fetched(tmp_path: Path) -> None:
    """Though what was found before is there still."""
    root = tmp_path / "media"
    arguments = [*map_arguments(tmp_path), "--format", "jsonl", "--out"]
    for number in range(COUNT):
        picture(root / "old" / f"{number}.png", number)
    killed(generic.main, [*arguments, str(tmp_path / "resumed")])
    picture(root / "new/0.png", 7)
    for out in ("resumed", "fresh"):
        assert generic.main([*arguments, str(tmp_path / out)]) == 0
    assert b"ambiguous_media" in contents(tmp_path / "fresh")["refused.jsonl"]
    assert contents(tmp_path / "resumed") == contents(tmp_path / "fresh")


def test_overwrite_drops_earlier_parts_and_can_be_resumed(tmp_path: Path, judged: list[int]) -> None:
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(tmp_path / "out"), "--workers", "1"]
    killed(gsm8k.main, arguments)
    assert judged == [0, 1, 2]
    killed(gsm8k.main, [*arguments, "--overwrite"])
    assert judged == [0, 1, 2] * 2, "parts of a run that did not begin anew are dropped"
    assert gsm8k.main([*arguments, "--overwrite"]) == 0 and judged == [0, 1, 2] * 2
    killed(gsm8k.main, [*arguments, "--overwrite"])
    assert judged == [0, 1, 2] * 3


def test_parts_of_another_program_are_dropped(
    tmp_path: Path, judged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(tmp_path / "out"), "--workers", "1"]
    killed(gsm8k.main, arguments)
    monkeypatch.setattr(command, "program", lambda: "another")
    assert gsm8k.main(arguments) == 0 and judged == [0, 1, 2] * 2


@pytest.mark.parametrize("damage", ["empty", "cut at a line", "cut", "holes", "of fewer rows", "without an end"])
def test_an_incomplete_part_is_judged_again(tmp_path: Path, judged: list[int], damage: str) -> None:
    out = tmp_path / "out"
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(out), "--workers", "1"]
    assert gsm8k.main(arguments) == 0
    expected = contents(out)
    shutil.rmtree(out)
    killed(gsm8k.main, arguments)
    part = out / ".parts/0000001.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    if damage == "of fewer rows":
        Spool(out, (out / ".parts/identity.json").read_text()).write(1, 15, [])
    else:
        part.write_bytes(
            {
                "empty": b"",
                "cut at a line": b"".join(lines[:10]),
                "cut": b"".join(lines)[:2_000],
                "holes": b"".join(lines)[:1_024] + bytes(1_024) + b"".join(lines)[2_048:],
                "without an end": b"".join(lines[:-1]),
            }[damage]
        )
    judged.clear()
    assert gsm8k.main(arguments) == 0
    assert judged == [1] and contents(out) == expected


def test_a_part_that_vanishes_during_the_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(tmp_path / "out"), "--workers", "1"]
    killed(gsm8k.main, [*arguments, "--overwrite"])
    has = Spool.has
    monkeypatch.setattr(Spool, "has", lambda self, number, rows: has(self, number, rows) or number == 1)
    (tmp_path / "out/.parts/0000001.jsonl").write_bytes(b"")
    with pytest.raises(VlmPgError, match=r"0000001\.jsonl' is not as this run wrote it.*Give the same command again"):
        gsm8k.main([*arguments, "--overwrite"])


def test_verdicts_come_back_as_they_were(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "a")
    verdict = Verdict("train", Sample("1\u2028", "a\x0bb\x85c", (), (), "x", "exact", "y", "z"), keys=("a\x0bb",))
    verdict = replace(verdict, found=(("a/1\udc80", "1", None, None), ("b/2", "2", "b", "/ann")))
    spool.write(0, 1, [verdict])
    spool.write(1, 4, [])
    assert spool.has(0, 1) and spool.has(1, 4) and not spool.has(1, 3) and not spool.has(2, 0)
    assert list(spool.verdicts(2)) == [verdict]
    assert Spool(tmp_path, "a").has(0, 1) and not Spool(tmp_path, "b").has(0, 1)


@pytest.mark.parametrize("grown", ["judge_all", "write_all"])
def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown: str) -> None:
    """A download that goes on. The set that was there stays, and the same command reads all."""
    source, out = sums(tmp_path / "rows.jsonl", 30), tmp_path / "out"
    arguments = ["--train", str(source), "--out", str(out), "--eval-share", "0", "--workers", "1"]
    assert gsm8k.main(arguments) == 0
    before = contents(out)
    sums(source, 31)
    step = getattr(command, grown)

    def growing(*some: object) -> object:
        done = step(*some)
        sums(source, 60)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(command, grown, growing)
        with pytest.raises(ConfigError, match=r"rows\.jsonl' changed while the set was prepared.*Wait until"):
            gsm8k.main([*arguments, "--overwrite"])
    assert contents(out) == before
    assert gsm8k.main([*arguments, "--overwrite"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["train"] + sum(report["refused"].values()) == 60


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
        self.probed: list[MediaRef] = []
        self._ends_after = ends_after

    def probe(self, ref: MediaRef, decode: bool = False) -> Future[MediaFacts] | SampleError:
        if len(self.probed) == self._ends_after:
            raise KeyboardInterrupt
        self.probed.append(ref)
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
        return loader.probed, list(ProbedMedia(book).with_facts(verdicts))


def test_each_clip_of_a_file_is_probed_once(root: Path) -> None:
    clip = video("0.mp4", start=1.0, end=9.0)
    wanted = [verdict(1, video("0.mp4")), verdict(2, video("./0.mp4"), video("1.mp4")), verdict(3, clip)]
    wanted += [verdict(4, clip), Verdict("train", skipped="source x")]
    probed, known = look(root, wanted)
    assert probed == [video("0.mp4"), video("1.mp4"), clip]
    first, second, third = (one.facts for one in known[:3])
    assert first[0] == second[0] and first[0].content == third[0].content != second[1].content
    assert first[0].seconds == third[0].seconds == pytest.approx(30) and third[0].frames == 16
    assert look(root, wanted)[0] == []


def test_facts_of_a_killed_run_are_not_probed_again(root: Path) -> None:
    wanted = [verdict(number, video(f"{number}.mp4")) for number in range(8)]
    with pytest.raises(KeyboardInterrupt):
        look(root, wanted, ends_after=5)
    probed, known = look(root, wanted)
    # With one file at a time it is asked for up to four before the first is written down.
    assert {ref.path for ref in probed} <= {f"{number}.mp4" for number in range(4, 8)} and len(probed) >= 3
    assert all(one.facts for one in known)


def test_a_changed_file_is_probed_again(root: Path) -> None:
    wanted = [verdict(number, video(f"{number}.mp4")) for number in range(4)] + [verdict(9, video("late.mp4"))]
    _, known = look(root, wanted)
    assert known[4].refused is not None and known[4].refused.reason == "missing_media"
    write_media(root / "2.mp4", 200)
    write_media(root / "late.mp4", 300)
    state = (root / "1.mp4").stat()
    os.utime(root / "1.mp4", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    probed, changed = look(root, wanted)
    assert [ref.path for ref in probed] == ["1.mp4", "2.mp4", "late.mp4"]
    assert changed[1] == known[1] and changed[2].facts[0].content != known[2].facts[0].content
    assert changed[4].facts and changed[4].refused is None


def test_a_folder_with_a_changed_picture_is_probed_again(root: Path) -> None:
    write_folder(root / "a", [coloured(number) for number in range(4)])
    write_folder(root / "b", [coloured(number) for number in range(4)])
    wanted = [verdict(number, video(name, folder_fps=2.0)) for number, name in enumerate("ab")]
    _, known = look(root, wanted)
    assert known[0].facts == known[1].facts and known[0].facts[0].seconds == 2.0
    write_folder(root / "b", [coloured(9)], first=3)
    probed, changed = look(root, wanted)
    assert [ref.path for ref in probed] == ["b"]
    assert changed[0] == known[0] and changed[1].facts[0].content != known[1].facts[0].content


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0" + b"x" * 5000, b"x" * 300])
def test_a_damaged_book_is_made_anew(root: Path, damage: bytes) -> None:
    wanted = [verdict(1, video("1.mp4"))]
    _, known = look(root, wanted)
    (root / "book.sqlite").write_bytes(damage)
    probed, again = look(root, wanted)
    assert len(probed) == 1 and again == known


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


def test_media_of_evaluation_are_not_trained_on_by_name_or_content(ledger: Ledger) -> None:
    splitter = Splitter(ledger, eval_share=0.0, seed=0)
    refused = Verdict("eval", skipped="x", keys=("gone.mp4",))
    splitter.note([Verdict("eval", sample(1), keys=("1.mp4",), facts=(facts("a"),)), refused])
    train = [("2.mp4", "a"), ("gone.mp4", "b"), ("3.mp4", "c")]
    placed = list(
        splitter.assign(Verdict("train", sample(9 + n), keys=(k,), facts=(facts(c),)) for n, (k, c) in enumerate(train))
    )
    assert placed[:2] == ["also in the evaluation file"] * 2 and isinstance(placed[2], Assigned)


def test_a_duplicate_has_the_same_text_media_and_clip(ledger: Ledger) -> None:
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
