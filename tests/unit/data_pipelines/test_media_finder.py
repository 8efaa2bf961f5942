"""Media are taken where it is certain whose they are, whatever else below the root has their names; else refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_pipelines import clevrer, nextqa, vsi
from data_pipelines.engine import media_finder
from data_pipelines.engine.annotation_files import count_rows
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import AnnotationFile
from data_pipelines.engine.media_finder import MediaFinder, MissingMedia
from data_pipelines.llava_video_178k import LLAVA_VIDEO_178K
from data_pipelines.vsi import VSI
from tests.support.pipeline_rows import empty_files
from tests.support.published.case import dataset_of
from tests.support.tiny_media import write_media
from vlm_pg.errors import ConfigError, SampleError

# Of CLEVRER's and Perception Test's names, which share those from video_10000 to video_11999.
EARLY, CUP, BOTH, LATE = "video_00428.mp4", "video_10000.mp4", "video_10428.mp4", "video_13428.mp4"
THOUSAND = "video_10000-11000"
FALL, ID, SITS, LONG = "0101/17.mp4", "17.mp4", "6H78U.mp4", "longvila_videos/5nKz1hzvSqs.mp4"
PLOT, ANGLE, FRAMES = "images/7.jpg", "test/1/img_diagram.png", "tvqa/frames_fps3_hq/castle_s07e05"
SCENE, BENCH, OTHER = "scannet/scene0191_00.mp4", "VSI-Bench", "VSI-590K"
SUBSET, SECOND = "0_30_s_nextqa", "30_60_s_nextqa"


def found_path(finder: MediaFinder, *query: object) -> str:
    """The path that is found, or the reason why there is none."""
    try:
        return finder.path_of(*query)  # type: ignore[arg-type]
    except SampleError as error:
        return error.reason


FOUND = [
    *[
        ("clevrer", EARLY, f"{folder}/{EARLY}", [f"my_renders/train/{EARLY}"])
        for folder in (
            "videos/train/video_00000-01000", "train/video_00000-01000", "videos/video_00000-01000",
            "train_video/video_00000-01000", "train", "videos/train", "Videos/train", "CLEVRER_v1/train",
        )
    ],
    ("clevrer", "video_15001.mp4", "test_videos/video_15001.mp4", []),
    *[("clevrer", BOTH, f"{split}/{THOUSAND}/{BOTH}", []) for split in ("val", "validation_video")],
    *[("clevrer", BOTH, f"{split}/{BOTH}", [f"{split}/{LATE}"]) for split in ("val", "videos/validation", "valid")],
    *[
        ("clevrer", CUP, f"{folder}/{CUP}", ["video_train/video_00000-01000/video_01000.mp4", f"a/{CUP}"])
        for folder in (f"video_validation/{THOUSAND}", "clevrer/video_validation", THOUSAND, ".")
    ],
    ("clevrer", BOTH, f"clevrer/val/{BOTH}", [f"videos/{BOTH}"]),
    ("perception_test", "video_0.mp4", "Perception_Test/videos/a/b/video_0.mp4", ["videos/OTHER/video_0.mp4"]),
    ("perception_test", "video_0.mp4", "train/videos/part2/video_0.mp4", []),
    *[
        ("perception_test", BOTH, f"{folder}/{BOTH}", [f"video_validation/{THOUSAND}/{BOTH}"])
        for folder in ("validation/videos", "train/videos", "data/videos", "videos", "val_videos")
    ],
    ("perception_test", BOTH, f"videos/part1/{BOTH}", [f"videos/{THOUSAND}/{BOTH}", f"videos/clevrer/val/{BOTH}"]),
    ("perception_test", "video_428.mp4", "videos/video_428.mp4", [f"videos/{EARLY}"]),
    ("perception_test", "video_10309.mp4", "video_10309.MP4", []),
    *[
        (name, SITS, f"{folder}/{SITS}", [f"a/{SITS}"])
        for name in ("star", "charades_sta")
        for folder in ("Charades_v1_480", "Charades_v1", "charades/Charades_v1_480", "a/b/Charades_v1", "videos", ".")
    ],
    ("charades_sta", SITS, "videos/6H78U.mkv", [f"videos/trimmed/{SITS}"]),
    ("star", SITS, f"Charades_v1_480/{SITS}", [f"Charades_v1/{SITS}", SITS]),  # of the sizes of Charades the first
    *[
        ("nextqa", path, f"{folder}/{path}", [f"other/{path}"])
        for folder in ("videos", "nextqa/videos", "VidOR/video")
        for path in (FALL, ID)
    ],
    ("nextqa", ID, f"videos/{FALL}", []),
    ("nextqa", FALL, f"videos/{ID}", []),
    ("nextqa", FALL, f"videos/{FALL}", [f"videos/0202/{ID}"]),
    ("nextqa", ID, f"a/b/NExTVideo/{FALL}", []),
    ("nextqa", FALL, f"NExTVideo/{ID}", []),
    ("nextqa", FALL, f"NExTVideo/part1/{FALL}", [f"NExTVideo/{ID}"]),  # the most of the wanted folders
    ("longvideo_reason", LONG, "videos/5nKz1hzvSqs.webm", ["videos/x/5nKz1hzvSqs.mp4"]),
    ("longvideo_reason", LONG, "longvideo_eval_videos/longvideo_eval_subset3/5nKz1hzvSqs.webm", []),
    ("mathvista", PLOT, f"data/{PLOT}", ["a/7.jpg"]),
    ("geometry3k", ANGLE, f"data/geometry3k/{ANGLE}", ["a/img_diagram.png"]),
    ("mvbench", FRAMES, f"MVBench/video/{FRAMES}", ["video/tvqa/frames_fps3_hq/other/00001.jpg"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "where", "others"), FOUND)
def test_media_are_found_in_usual_layouts(tmp_path: Path, name: str, path: str, where: str, others: list[str]) -> None:
    empty_files(tmp_path, f"{where}/00001.jpg" if path == FRAMES else where, *others)
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == where.removeprefix("./")


@pytest.mark.parametrize(
    ("name", "root", "path", "where"),
    [
        ("clevrer", "train", EARLY, f"video_00000-01000/{EARLY}"), ("clevrer", "videos", EARLY, f"train/{EARLY}"),
        ("clevrer", "clevrer", BOTH, f"val/{BOTH}"), ("clevrer", "video_train", CUP, f"{THOUSAND}/{CUP}"),
        ("perception_test", "validation", BOTH, f"videos/{BOTH}"), ("perception_test", "any", CUP, "video_10000.MP4"),
        ("star", "videos", SITS, SITS), ("charades_sta", "Charades", SITS, f"Charades_v1_480/{SITS}"),
        ("charades_sta", "anything", SITS, SITS), ("nextqa", "nextqa/videos", ID, FALL),
        ("nextqa", "nextqa/videos", FALL, ID), ("nextqa", "NExTQA", ID, f"videos/{FALL}"),
        ("nextqa", "NExTVideo", ID, FALL), ("longvideo_reason", "longvila_videos", LONG, "5nKz1hzvSqs.mp4"),
        ("longvideo_reason", "anything", LONG, "5nKz1hzvSqs.mkv"), ("mathvista", "data", PLOT, PLOT),
    ],
)  # fmt: skip
def test_the_root_may_be_the_folder_of_the_media(tmp_path: Path, name: str, root: str, path: str, where: str) -> None:
    empty_files(tmp_path / root, where)
    assert MediaFinder(tmp_path / root, dataset_of(name)).path_of(path) == where


@pytest.mark.parametrize(
    ("name", "path", "files"),
    [
        ("clevrer", BOTH, [f"val/{BOTH}"]),  # Perception Test has a video of this name, and has none of 12000 or more
        ("clevrer", BOTH, [f"val/{BOTH}", f"val/{LATE}", "val/video_7.mp4"]),
        ("clevrer", BOTH, [f"train/{BOTH}", f"train/{EARLY}"]),
        ("clevrer", BOTH, [f"train/videos/{BOTH}", f"train/videos/{LATE}"]),
        ("clevrer", BOTH, [f"perception_test/videos/{BOTH}", f"videos/{BOTH}", f"MVBench/{BOTH}"]),
        ("clevrer", EARLY, [f"my_renders/train/{EARLY}", f"my_renders/train_videos/{EARLY}"]),
        ("clevrer", EARLY, [f"video_00000-01000/masks/{EARLY}"]),
        ("clevrer", BOTH, [f"videos/video_11000-12000/{BOTH}"]),
        ("clevrer", EARLY, [f"videos/{EARLY}", f"clevrer/val/{EARLY}"]),
        ("perception_test", CUP, [f"clevrer/video_validation/{THOUSAND}/{CUP}", f"other/videos/{CUP}"]),
        *(
            ("perception_test", "video_0.mp4", [f"{folder}/OTHER/video_0.mp4"])
            for folder in ("videos", "validation/videos", "data/videos", "videos/part1")
        ),
        ("perception_test", BOTH, [f"videos/val/{THOUSAND}/{BOTH}"]),
        ("perception_test", BOTH, [f"videos/{BOTH}", f"videos/{EARLY}"]),
        ("perception_test", BOTH, [f"videos/val/{BOTH}", f"videos/val/{LATE}"]),
        ("perception_test", BOTH, [f"videos/video_validation/{BOTH}", f"clevrer/videos/{BOTH}"]),
        ("star", SITS, [f"videos/clips/{SITS}", f"Charades/clips/{SITS}", f"Charades_v1_trimmed/{SITS}"]),
        ("charades_sta", SITS, [f"elsewhere/{SITS}"]),
        ("nextqa", FALL, [f"videos/0202/{ID}", "other/17.mp4", f"NExTVideo/0202/{ID}", f"other/{FALL}"]),
        ("nextqa", ID, [f"videos/other/{ID}", f"videos/0101/deep/{ID}", f"videos/0101/0202/{ID}", FALL]),
        ("longvideo_reason", LONG, ["videos/x/5nKz1hzvSqs.mp4", "other/5nKz1hzvSqs.mp4"]),
        ("video_r1", f"CLEVRER/{CUP}", [f"other/CLEVRER/{CUP}", CUP]),
        ("mathvista", PLOT, [f"other/{PLOT}", "7.jpg"]),
        ("geometry3k", ANGLE, [f"old/{ANGLE}", "img_diagram.png"]),
    ],
)
def test_files_that_may_be_of_another_set_are_not_taken(tmp_path: Path, name: str, path: str, files: list[str]) -> None:
    empty_files(tmp_path, *files)
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == path
    assert not (tmp_path / path).exists()


@pytest.mark.parametrize(("name", "path", "folder"), [("mathvista", PLOT, "data"), ("geometry3k", ANGLE, "geometry3k")])
def test_a_file_in_the_root_is_not_of_a_folder_that_lacks_it(tmp_path: Path, name: str, path: str, folder: str) -> None:
    empty_files(tmp_path, path, f"{folder}/of-another-kind.txt")
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == path
    (tmp_path / folder / Path(path).parts[0]).mkdir()
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == f"{folder}/{path}"


@pytest.mark.parametrize(
    ("name", "path", "files"),
    [
        ("longvideo_reason", LONG, [f"longvideo_eval_subset{number}/5nKz1hzvSqs.mp4" for number in range(4)]),
        ("nextqa", ID, [f"videos/0101/{ID}", f"videos/0202/{ID}"]),
        ("mvbench", FRAMES, [f"{folder}/{FRAMES}/00001.jpg" for folder in ("MVBench/video", "video")]),
    ],
)
def test_several_files_of_one_name_are_refused(tmp_path: Path, name: str, path: str, files: list[str]) -> None:
    empty_files(tmp_path, *files)
    with pytest.raises(SampleError, match=r"may be .*, .*\. One file of that name below") as error:
        MediaFinder(tmp_path, dataset_of(name)).path_of(path)
    assert error.value.reason == "ambiguous_media" and ("..." in str(error.value)) == (len(files) > 3)


@pytest.mark.parametrize(
    ("path", "files", "expected"),
    [
        ("1.mp4", ["clips/a/1.mp4", "1.mp4"], "clips/a/1.mp4"), ("1.mp4", ["clips/a/2.mp4", "1.mp4"], "clips/1.mp4"),
        ("1.mp4", ["clips/a/1.mkv"], "clips/1.mp4"), ("clips/a/1.mp4", ["clips/a/1.mp4"], "clips/a/1.mp4"),
        ("a/1.mp4", ["clips/a/1.mp4", "clips/b/1.mp4", "a/1.mp4"], "clips/a/1.mp4"),
        ("a/1.mp4", ["clips/a/2.mp4", "a/1.mp4", "other/1.mp4"], "clips/a/1.mp4"),
        ("old/1.mp4", ["old/1.mp4", "clips/a/1.mp4"], "old/1.mp4"),
        ("b/1.mp4", ["more/b/1.mp4", "clips/a/b/2.mp4"], "more/b/1.mp4"),
        ("a/1.mp4", ["clips/a/1.mp4", "more/a/1.mp4"], "ambiguous_media"),
    ],
)  # fmt: skip
def test_paths_start_from_the_folders_of_a_map(tmp_path: Path, path: str, files: list[str], expected: str) -> None:
    empty_files(tmp_path, *files)
    (tmp_path / "clips").mkdir(exist_ok=True)
    assert found_path(MediaFinder(tmp_path, DataSet("mine", (), ("clips/**", "more"), by_name=False)), path) == expected


def test_the_root_may_be_one_of_the_folders_of_a_map(tmp_path: Path) -> None:
    empty_files(tmp_path, "a/1.mp4", "clips/a/2.mp4")
    finder = MediaFinder(tmp_path, DataSet("mine", (), (".", "clips"), by_name=False))
    assert [finder.path_of(f"a/{number}.mp4") for number in (1, 2)] == ["a/1.mp4", "clips/a/2.mp4"]


def test_names_that_are_no_path_below_the_root_stay_as_written(tmp_path: Path) -> None:
    empty_files(tmp_path, CUP)
    finder = MediaFinder(tmp_path / "root", dataset_of("clevrer"))
    for path in (f"../{CUP}", f"{tmp_path}/{CUP}", f"http://a.example/{CUP}", " ", "x" * 300 + ".mp4", "a\0.mp4"):
        assert finder.path_of(path).strip() == path.strip()
    own = MediaFinder(tmp_path / "root", VSI).path_of
    assert own(f"../{CUP}", BENCH, tmp_path) == f"{BENCH}/../{CUP}"
    assert own(f"/etc/{CUP}", BENCH, tmp_path) == f"/etc/{CUP}"


@pytest.mark.parametrize(
    ("wanted", "root", "annotations", "files", "expected"),
    [
        (BENCH, ".", BENCH, [f"{BENCH}/{SCENE}", f"{OTHER}/{SCENE}", SCENE], f"{BENCH}/{SCENE}"),
        (BENCH, ".", BENCH, [f"{OTHER}/{SCENE}", SCENE], f"{BENCH}/{SCENE}"),
        (BENCH, ".", f"{OTHER}/..", [f"{OTHER}/{SCENE}", SCENE], SCENE),
        (BENCH, ".", "notes", [f"{BENCH}/{SCENE}", f"notes/{SCENE}"], f"{BENCH}/{SCENE}"),
        (BENCH, ".", "bench", [f"bench/{SCENE}", SCENE], f"bench/{SCENE}"),
        (BENCH, ".", f"deep/{BENCH}", [f"{BENCH}/{SCENE}"], f"deep/{BENCH}/{SCENE}"),
        (BENCH, BENCH, "notes", [SCENE], SCENE),
        (BENCH, OTHER, BENCH, [SCENE], f"{BENCH}/{SCENE}"),
        (BENCH, "media", BENCH, [SCENE], f"{BENCH}/{SCENE}"),
        (BENCH, "media", "media", [SCENE], SCENE),
        (BENCH, "media", "media", ["x.mp4"], SCENE),
        # What lies in a folder of any name may be the other set's, which has videos of the same paths.
        (OTHER, "bench", "ann", [SCENE, "test.jsonl"], f"{OTHER}/{SCENE}"),
        (OTHER, "bench", "ann", [SCENE, f"vsi590k/{SCENE}"], f"vsi590k/{SCENE}"),
        (OTHER, "bench", "ann", [SCENE, "vsi590k/x.mp4"], f"vsi590k/{SCENE}"),
        (OTHER, "media", "ann", [f"{OTHER}/{SCENE}", f"vsi590k/{SCENE}"], f"{OTHER}/{SCENE}"),
        (OTHER, "media", "ann", [f"VSI_590K-videos/{SCENE}", f"vsi_bench/{SCENE}"], f"VSI_590K-videos/{SCENE}"),
        (OTHER, "media", "ann", [f"vsi590k/{SCENE}", f"vsi-590k/{SCENE}"], "ambiguous_media"),
        (OTHER, "media", "ann", [f"vsi590k/{SCENE}", "vsi-590k/scannet/x.mp4"], f"vsi590k/{SCENE}"),
        (OTHER, "vsi_590k", "ann", [SCENE], SCENE),
        (OTHER, "vsi_bench", "vsi_bench", [SCENE], f"{OTHER}/{SCENE}"),
        (OTHER, "media", "media/vsi-bench", [f"vsi-bench/{SCENE}"], f"{OTHER}/{SCENE}"),
        (OTHER, "media", "media/any", [f"any/{SCENE}"], f"any/{SCENE}"),
    ],
)
def test_a_form_with_one_folder_takes_files_of_that_alone(
    tmp_path: Path, wanted: str, root: str, annotations: str, files: list[str], expected: str
) -> None:
    empty_files(tmp_path / root, *files)
    (tmp_path / annotations).mkdir(parents=True, exist_ok=True)
    finder = MediaFinder(tmp_path / root, VSI, OTHER if wanted == OTHER else None)
    assert found_path(finder, SCENE, wanted, tmp_path / annotations) == expected


@pytest.mark.parametrize(
    ("root", "files", "only", "expected"),
    [
        ("media", [SCENE], SUBSET, SCENE),
        ("media", [SCENE], None, f"{SUBSET}/{SCENE}"),  # rows of another subset have a video of this path, too
        ("media", [SCENE, f"{SECOND}/x.mp4"], SUBSET, f"{SUBSET}/{SCENE}"),
        ("media", [SCENE, f"{SUBSET}/x.mp4"], SUBSET, f"{SUBSET}/{SCENE}"),
        (SECOND, [SCENE], SUBSET, f"{SUBSET}/{SCENE}"),
        ("media", ["elsewhere/scene0191_00.mp4"], SUBSET, f"{SUBSET}/{SCENE}"),
    ],
)
def test_the_root_is_the_one_folder_of_all_rows_under_another_name_unless_it_has_anothers(
    tmp_path: Path, root: str, files: list[str], only: str | None, expected: str
) -> None:
    empty_files(tmp_path / root, *files)
    assert MediaFinder(tmp_path / root, LLAVA_VIDEO_178K, only).path_of(SCENE, SUBSET, tmp_path) == expected


@pytest.mark.parametrize(
    ("dataset", "forms", "sources", "only"),
    [
        (VSI, (0, 0), (), OTHER), (VSI, (1, 1), (), BENCH), (VSI, (0, 1), (), None),
        (LLAVA_VIDEO_178K, (0,), (SUBSET, SUBSET), SUBSET), (LLAVA_VIDEO_178K, (0,), (SUBSET, SECOND), None),
    ],
)  # fmt: skip
def test_the_one_folder_of_all_rows_is_read_from_the_annotations(
    tmp_path: Path, dataset: DataSet, forms: tuple[int, ...], sources: tuple[str, ...], only: str | None
) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(len(forms))]
    rows = [*({"data_source": name} for name in sources), {"video": "no source"}, 7]
    for path in paths:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [AnnotationFile(path, form, "", "train") for path, form in zip(paths, forms, strict=True)]
    assert count_rows(dataset, files) == (dict.fromkeys(paths, len(rows)), only)


@pytest.mark.parametrize(("name", "folder"), [("clevrer", "train"), ("perception_test", "videos")])
def test_the_names_in_a_folder_are_judged_once_and_not_for_each_of_its_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    number, looks, count = clevrer._number, [0], 60
    monkeypatch.setattr(clevrer, "_number", lambda stem: looks.__setitem__(0, looks[0] + 1) or number(stem))
    first = 0 if name == "clevrer" else 10_000  # of Perception Test's names those that both have
    names = [f"video_{one:05d}.mp4" for one in range(first, first + count)]
    empty_files(tmp_path, *(f"{folder}/{one}" for one in names))
    finder = MediaFinder(tmp_path, dataset_of(name))
    assert [finder.path_of(one) for one in names] == [f"{folder}/{one}" for one in names]
    assert looks[0] < 10 * count


def fault(root: Path, name: str, wanted: str, folder: str | None = None, only: str | None = None) -> str:
    """The message about a missing file."""
    finder = MediaFinder(root, dataset_of(name), only)
    path = finder.path_of(wanted, folder, root / "notes")
    assert not (root / path).exists()
    error = MissingMedia(finder).fault(path)
    assert error.reason == "missing_media"
    return str(error)


@pytest.mark.parametrize(
    ("name", "wanted", "files", "message", "root"),
    [
        ("clevrer", BOTH, [f"val/{BOTH}"], r"looked for in 'val' below .* and in the root itself\.", "val"),
        ("clevrer", BOTH, [f"a/b/{BOTH}"], r"none of the folders 'video_train', .* \d+ more\. Of that .*'a/b/v", "a/b"),
        ("perception_test", BOTH, [f"x/{n}/{BOTH}" for n in range(6)], r"'x/3/video_10428.mp4' and 2 more, ma", "x/0"),
        ("nextqa", ID, [FALL], r"is '0101/17.mp4', maybe another data set's\. Fetch the file; or", "0101"),
        ("nextqa", ID, ["x/17.webm"], r"there is 'x/17.webm'", "x"),
        ("video_r1", "./CLEVRER/a.mp4", ["data/CLEVRER/a.mp4", "b/a.mp4"], r"is 'data/CLEVRER/a.mp4', maybe", "data"),
        ("geometry3k", "train/1/img_diagram.png", ["geometry3k/train/2/x.png"], r"looked for in 'geometry3k' be", None),
        ("geometry3k", "train/1/img_diagram.png", [f"{n}/img_diagram.png" for n in range(9)], r"No file of that", None),
        ("mathvista", "images/1.jpg", ["1.jpg"], r"that is the one meant, move it to 'images/1\.jpg'\.", None),
        ("star", SITS, ["x/y.mp4"], r"No file of that name is in the root\. Fetch it, or correct --media-root", None),
    ],
)
def test_a_missing_medium_is_reported_with_the_folders_searched_and_a_root_that_has_it(
    tmp_path: Path, name: str, wanted: str, files: list[str], message: str, root: str | None
) -> None:
    empty_files(tmp_path, *files)
    reported = fault(tmp_path, name, wanted)
    assert re.search(message, reported)
    assert ("give --media-root" in reported) == (root is not None)
    if root is not None:
        assert reported.endswith(f"give --media-root {tmp_path / root}.")
        assert (tmp_path / root / MediaFinder(tmp_path / root, dataset_of(name)).path_of(wanted)).is_file()


def test_a_missing_medium_of_a_row_with_one_folder(tmp_path: Path) -> None:
    empty_files(tmp_path, f"any/{SCENE}")
    reported = fault(tmp_path, "vsi", SCENE, BENCH, BENCH)
    assert (
        f"looked for in '{BENCH}' below the media root" in reported and "alone, which is to be the folder" in reported
    )
    assert f"there is 'any/{SCENE}'" in reported and reported.endswith(f"move it to '{BENCH}/{SCENE}'.")
    (tmp_path / "any").rename(tmp_path / BENCH)
    assert MediaFinder(tmp_path / BENCH, VSI).path_of(SCENE, BENCH, tmp_path / "notes") == SCENE
    (tmp_path / BENCH / "scannet").rename(tmp_path / "else")
    assert fault(tmp_path, "vsi", SCENE, BENCH).endswith(f"move it to '{BENCH}/{SCENE}'.")
    empty_files(tmp_path, f"sub/{SCENE}")
    reported = fault(tmp_path, "llava_video_178k", SCENE, SUBSET, SUBSET)
    assert reported.endswith(f"--media-root {tmp_path / 'sub'}.")
    assert fault(tmp_path, "llava_video_178k", SCENE, SUBSET).endswith(f"move it to '{SUBSET}/{SCENE}'.")


def test_the_search_for_missing_media_is_bounded_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_files(tmp_path, *(f"a/{number}.mp4" for number in range(5)), f"z/{BOTH}")
    monkeypatch.setattr(media_finder, "SEARCHED", 5)
    assert "No file of that name is in the first 5 files below the root." in fault(tmp_path, "clevrer", BOTH)
    monkeypatch.setattr(media_finder, "SEARCHED", 6)
    assert "there is 'z/" in fault(tmp_path, "clevrer", BOTH)
    assert "No file of that name is in the root" in fault(tmp_path, "clevrer", "video_10429.mp4")
    walks = []
    whole = media_finder.files_in
    monkeypatch.setattr(media_finder, "files_in", lambda *given: walks.append(given) or whole(*given))
    missing = MissingMedia(finder := MediaFinder(tmp_path, dataset_of("clevrer")))
    for number in range(20):
        missing.fault(finder.path_of(f"video_1000{number}.mp4"))
    assert [given[1] for given in walks].count(media_finder.EVERYTHING) == 1


def test_reports_do_not_depend_on_earlier_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other processes judge other rows."""
    monkeypatch.setattr(media_finder, "_MAX_ROOTS", 4)
    names = [f"{number}.mp4" for number in range(8)]
    empty_files(tmp_path, *(f"x{name[0]}/{name}" for name in names))

    def all_reported(order: list[str]) -> dict[str, str]:
        missing = MissingMedia(finder := MediaFinder(tmp_path, dataset_of("nextqa")))
        paths = {name: finder.path_of(name) for name in order}
        return {name: str(missing.fault(path)) for name, path in paths.items()}

    expected = all_reported(names)
    assert sum("give --media-root" in reported for reported in expected.values()) == 4
    assert all_reported(names[::-1]) == expected
    assert {name: all_reported([name])[name] for name in names} == expected


def test_the_command_reports_missing_media(tmp_path: Path) -> None:
    header = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
    rows = "".join(f"{video},9,1,1,why {video},0,1,CW,a,b,c,d,e\n" for video in (17, 19))
    (tmp_path / "train.csv").write_text(header + rows)
    write_media(tmp_path / "videos" / "0101" / "17.mp4", 17)
    write_media(tmp_path / "else" / "19.mp4", 19)
    assert nextqa.main([str(tmp_path), "--out", str(tmp_path / "out"), "--eval-share", "0"]) == 0
    [refused] = map(json.loads, (tmp_path / "out" / "refused.jsonl").read_text().splitlines())
    assert refused["reason"] == "missing_media" and "looked for in 'videos' below" in refused["message"]
    assert refused["message"].endswith(f"--media-root {tmp_path / 'else'}.")


def test_the_command_takes_the_root_for_a_folder_of_that_name(tmp_path: Path) -> None:
    bench = {"id": 1, "dataset": "scannet", "scene_name": "scene0191_00", "question_type": "object_counting"}
    bench |= {"question": "How many?", "ground_truth": "4", "options": None}
    (tmp_path / "bench.jsonl").write_text(json.dumps(bench) + "\n")
    write_media(tmp_path / "media" / SCENE, 1)
    given = ["--train", str(tmp_path / "bench.jsonl"), "--eval-share", "0", "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"refused +1  missing_media"):  # VSI-590K has a video of this path, too
        vsi.main([*given, "--media-root", str(tmp_path / "media")])
    (tmp_path / "media").rename(tmp_path / "vsi_bench")
    assert vsi.main([*given, "--media-root", str(tmp_path / "vsi_bench")]) == 0
