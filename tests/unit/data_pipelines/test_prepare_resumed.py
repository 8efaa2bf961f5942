"""What a killed run left is used as far as it holds: media came or went, parts were cut, files changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from data_pipelines import generic, gsm8k, star, video_r1, vsi
from data_pipelines.engine import command
from data_pipelines.engine.judging import Judge, Part, Verdict
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.engine.resume import Spool, StaleVerdicts
from tests.support.pipeline_rows import empty_files
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError, VlmPgError
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


def sums(path: Path, count: int = 600) -> Path:
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


@pytest.mark.parametrize(
    ("change", "more"), [("fetched", []), ("fetched", ["--skip-media-check"]), ("moved", ["--skip-media-check"])]
)
def test_media_that_were_fetched_or_moved_since(tmp_path: Path, change: str, more: list[str]) -> None:
    root, out = tmp_path / "media", tmp_path / "out"
    fields = {name: name for name in ("problem", "data_type", "problem_type", "path")}
    described = {"fields": {**fields, "answer": {"field": "solution", "given_as": "tagged"}}, "name": "mine"}
    (tmp_path / "map.yaml").write_text(json.dumps({**described, "media_folders": ["old", "new"]}))
    files = ["--train", str(questions(tmp_path / "rows.jsonl")), "--media-root", str(root), "--workers", "1", *more]
    arguments = ["--map", str(tmp_path / "map.yaml"), *files, "--out", str(out), "--eval-share", "0"]
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


def test_what_depends_on_files_is_in_doubt_what_depends_on_the_row_is_not(tmp_path: Path) -> None:
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


def test_a_file_that_is_preferred_to_the_one_that_was_found(tmp_path: Path) -> None:
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


def test_one_that_goes_on_is_as_one_that_begins_after_media_were_fetched(tmp_path: Path) -> None:
    """Though what was found before is there still."""
    root = tmp_path / "media"
    fields = {name: name for name in ("problem", "data_type", "problem_type", "path")}
    described = {"fields": {**fields, "answer": {"field": "solution", "given_as": "tagged"}}, "name": "mine"}
    (tmp_path / "map.yaml").write_text(json.dumps({**described, "media_folders": ["old", "new"]}))
    files = ["--train", str(questions(tmp_path / "rows.jsonl")), "--media-root", str(root), "--workers", "1"]
    arguments = ["--map", str(tmp_path / "map.yaml"), *files, "--eval-share", "0", "--format", "jsonl", "--out"]
    for number in range(COUNT):
        picture(root / "old" / f"{number}.png", number)
    killed(generic.main, [*arguments, str(tmp_path / "gone-on")])
    picture(root / "new/0.png", 7)
    for out in ("gone-on", "fresh"):
        assert generic.main([*arguments, str(tmp_path / out)]) == 0
    assert b"ambiguous_media" in contents(tmp_path / "fresh")["refused.jsonl"]
    assert contents(tmp_path / "gone-on") == contents(tmp_path / "fresh")


def test_to_overwrite_is_to_begin_anew_and_is_gone_on_with(tmp_path: Path, judged: list[int]) -> None:
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
def test_a_part_that_is_not_whole_is_judged_again(tmp_path: Path, judged: list[int], damage: str) -> None:
    out = tmp_path / "out"
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(out), "--workers", "1"]
    assert gsm8k.main(arguments) == 0
    expected = contents(out)
    shutil.rmtree(out)
    killed(gsm8k.main, arguments)
    part = out / ".parts/0000001.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    if damage == "of fewer rows":
        Spool(out, (out / ".parts/identity.json").read_text()).write(1, 200, [])
    else:
        part.write_bytes(
            {
                "empty": b"",
                "cut at a line": b"".join(lines[:100]),
                "cut": b"".join(lines)[:5_000],
                "holes": b"".join(lines)[:4_096] + bytes(4_096) + b"".join(lines)[8_192:],
                "without an end": b"".join(lines[:-1]),
            }[damage]
        )
    judged.clear()
    assert gsm8k.main(arguments) == 0
    assert judged == [1] and contents(out) == expected


def test_no_row_is_lost_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--train", str(sums(tmp_path / "rows.jsonl")), "--out", str(tmp_path / "out"), "--workers", "1"]
    write = Spool.write
    monkeypatch.setattr(Spool, "write", lambda self, number, rows, some: write(self, number, rows - number, some))
    with pytest.raises(VlmPgError, match=r"have 600 rows, of which 597 were judged.*with --overwrite"):
        gsm8k.main(arguments)
    monkeypatch.undo()
    placed = command.Splitter.assign
    monkeypatch.setattr(command.Splitter, "assign", lambda self, some: list(placed(self, some))[:-2])
    with pytest.raises(
        VlmPgError, match=r"of their 600 questions 598 were kept, refused or left out.*None may be lost"
    ):
        gsm8k.main([*arguments, "--overwrite"])
    monkeypatch.undo()
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
    assert list(spool.verdicts(2)) == [verdict] and spool.totals(2) == (5, 1)
    assert Spool(tmp_path, "a").has(0, 1) and not Spool(tmp_path, "b").has(0, 1)


@pytest.mark.parametrize("grown", ["judge_all", "write_all"])
def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown: str) -> None:
    """A download that goes on. The set that was there stays, and the same command reads all."""
    source, out = sums(tmp_path / "rows.jsonl", 300), tmp_path / "out"
    arguments = ["--train", str(source), "--out", str(out), "--eval-share", "0", "--workers", "1"]
    assert gsm8k.main(arguments) == 0
    before = contents(out)
    sums(source, 301)
    step = getattr(command, grown)

    def growing(*some: object) -> object:
        done = step(*some)
        sums(source, 600)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(command, grown, growing)
        with pytest.raises(ConfigError, match=r"rows\.jsonl' changed while the set was prepared.*Wait until"):
            gsm8k.main([*arguments, "--overwrite"])
    assert contents(out) == before
    assert gsm8k.main([*arguments, "--overwrite"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["train"] + sum(report["refused"].values()) == 600
