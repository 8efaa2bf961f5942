"""Of a medium that is not there it is said where it was looked for, where a file of its name lies, and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_pipelines import nextqa, vsi
from data_pipelines.engine import media_finder
from data_pipelines.engine.media_finder import MediaFinder, MissingMedia
from tests.support.pipeline_rows import empty_files
from tests.support.tiny_media import write_media
from tests.unit.data_pipelines.test_finding import dataset_of
from vlm_pg.errors import ConfigError

BOTH, SCENE, BENCH = "video_10428.mp4", "scannet/scene0191_00.mp4", "VSI-Bench"
HEADER = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"


def said(
    root: Path, name: str, wanted: str, folder: str | None = None, only: str | None = None, searched: int = 1000
) -> str:
    """Of a file that is not found."""
    dataset = dataset_of(name)
    finder = MediaFinder(root, dataset, only)
    path = finder.path_of(wanted, folder, root / "notes")
    assert not (root / path).exists()
    fault = MissingMedia(finder, searched).fault(path)
    assert fault.reason == "missing_media"
    return str(fault)


CASES = [
    ("clevrer", BOTH, [f"val/{BOTH}"], r"looked for in 'val' below .* and in the root itself\.", "val"),
    ("clevrer", BOTH, [f"a/b/{BOTH}"], r"none of the folders 'video_train', .* and \d+ more\. Of that .*'a/b/v", "a/b"),
    ("perception_test", BOTH, [f"x/{n}/{BOTH}" for n in range(6)], r"'x/3/video_10428.mp4' and 2 more, maybe", "x/0"),
    ("nextqa", "17.mp4", ["0101/17.mp4"], r"is '0101/17.mp4', maybe another data set's\. Fetch the file; or", "0101"),
    ("nextqa", "17.mp4", ["x/17.webm"], r"there is 'x/17.webm'", "x"),
    ("video_r1", "./CLEVRER/a.mp4", ["data/CLEVRER/a.mp4", "b/a.mp4"], r"there is 'data/CLEVRER/a.mp4', maybe", "data"),
    ("geometry3k", "train/1/img_diagram.png", ["geometry3k/train/2/x.png"], r"looked for in 'geometry3k' below", None),
    ("geometry3k", "train/1/img_diagram.png", [f"{n}/img_diagram.png" for n in range(9)], r"No file of that na", None),
    ("mathvista", "images/1.jpg", ["1.jpg"], r"that is the one meant, move it to 'images/1\.jpg'\.", None),
    (
        "star",
        "6H78U.mp4",
        ["x/y.mp4"],
        r"No file of that name is in the root\. Fetch it, or correct --media-root",
        None,
    ),
]


@pytest.mark.parametrize(("name", "wanted", "files", "message", "root"), CASES)
def test_it_says_where_it_looked_and_what_would_do(
    tmp_path: Path, name: str, wanted: str, files: list[str], message: str, root: str | None
) -> None:
    empty_files(tmp_path, *files)
    told = said(tmp_path, name, wanted)
    assert re.search(message, told)
    assert ("give --media-root" in told) == (root is not None)
    if root is not None:
        assert told.endswith(f"give --media-root {tmp_path / root}.")
        found = MediaFinder(tmp_path / root, dataset_of(name)).path_of(wanted)
        assert (tmp_path / root / found).is_file()


def test_of_a_row_with_one_folder(tmp_path: Path) -> None:
    empty_files(tmp_path, f"any/{SCENE}")
    told = said(tmp_path, "vsi", SCENE, BENCH, BENCH)
    assert f"looked for in '{BENCH}' below the media root" in told and "alone, which is to be the folder" in told
    assert told.endswith(f"call '{tmp_path / 'any'}' '{BENCH}' and give --media-root {tmp_path / BENCH}.")
    told = said(tmp_path / "any", "vsi", SCENE, BENCH, BENCH)
    assert told.endswith(f"call '{tmp_path / 'any'}' '{BENCH}' and give --media-root {tmp_path / BENCH}.")
    (tmp_path / "any").rename(tmp_path / BENCH)
    assert MediaFinder(tmp_path / BENCH, dataset_of("vsi")).path_of(SCENE, BENCH, tmp_path / "notes") == SCENE
    (tmp_path / BENCH / "scannet").rename(tmp_path / "else")
    assert said(tmp_path, "vsi", SCENE, BENCH).endswith(f"move it to '{BENCH}/{SCENE}'.")
    subset = "0_30_s_nextqa"
    empty_files(tmp_path, f"sub/{SCENE}")
    told = said(tmp_path, "llava_video_178k", SCENE, subset, subset)
    assert told.endswith(f"--media-root {tmp_path / 'sub'}.")
    assert said(tmp_path, "llava_video_178k", SCENE, subset).endswith(f"move it to '{subset}/{SCENE}'.")


def test_the_search_has_an_end_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_files(tmp_path, *(f"a/{number}.mp4" for number in range(5)), f"z/{BOTH}")
    assert "No file of that name is in the first 5 files below the root." in said(tmp_path, "clevrer", BOTH, searched=5)
    assert "there is 'z/" in said(tmp_path, "clevrer", BOTH, searched=6)
    assert "No file of that name is in the root" in said(tmp_path, "clevrer", "video_10429.mp4", searched=6)
    walks = []
    whole = media_finder.files_in
    monkeypatch.setattr(media_finder, "files_in", lambda *given: walks.append(given) or whole(*given))
    dataset = dataset_of("clevrer")
    missing = MissingMedia(finder := MediaFinder(tmp_path, dataset))
    for number in range(20):
        path = finder.path_of(f"video_1000{number}.mp4")
        missing.fault(path)
    assert [given[1] for given in walks].count(media_finder.EVERYTHING) == 1


def test_what_is_said_does_not_depend_on_what_was_asked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other processes judge other rows."""
    monkeypatch.setattr(media_finder, "_MAX_ROOTS", 4)
    names = [f"{number}.mp4" for number in range(8)]
    empty_files(tmp_path, *(f"x{name[0]}/{name}" for name in names))

    def all_said(order: list[str]) -> dict[str, str]:
        dataset = dataset_of("nextqa")
        missing = MissingMedia(finder := MediaFinder(tmp_path, dataset))
        paths = {name: finder.path_of(name) for name in order}
        return {name: str(missing.fault(path)) for name, path in paths.items()}

    expected = all_said(names)
    assert sum("give --media-root" in told for told in expected.values()) == 4
    assert all_said(names[::-1]) == expected
    assert {name: all_said([name])[name] for name in names} == expected


def test_the_command_says_so(tmp_path: Path) -> None:
    rows = "".join(f"{video},9,1,1,why {video},0,1,CW,a,b,c,d,e\n" for video in (17, 18, 19))
    (tmp_path / "train.csv").write_text(HEADER + rows)
    for number in (17, 18):
        write_media(tmp_path / "videos" / "0101" / f"{number}.mp4", number)
    write_media(tmp_path / "else" / "19.mp4", 19)
    assert nextqa.main([str(tmp_path), "--out", str(tmp_path / "out"), "--eval-share", "0"]) == 0
    [refused] = map(json.loads, (tmp_path / "out" / "refused.jsonl").read_text().splitlines())
    assert refused["reason"] == "missing_media"
    assert "looked for in 'videos' below" in refused["message"]
    assert refused["message"].endswith(f"--media-root {tmp_path / 'else'}.")


def test_the_command_takes_the_root_for_a_folder_that_is_called_so(tmp_path: Path) -> None:
    bench = {"id": 1, "dataset": "scannet", "scene_name": "scene0191_00", "question_type": "object_counting"}
    bench |= {"question": "How many?", "ground_truth": "4", "options": None}
    (tmp_path / "bench.jsonl").write_text(json.dumps(bench) + "\n")
    write_media(tmp_path / "media" / SCENE, 1)
    given = ["--train", str(tmp_path / "bench.jsonl"), "--eval-share", "0", "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"refused +1  missing_media"):  # VSI-590K has a video of this path, too
        vsi.main([*given, "--media-root", str(tmp_path / "media")])
    (tmp_path / "media").rename(tmp_path / "vsi_bench")
    assert vsi.main([*given, "--media-root", str(tmp_path / "vsi_bench")]) == 0
