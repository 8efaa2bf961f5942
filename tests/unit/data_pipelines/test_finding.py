"""Media are taken from the folders of their own data set, whatever else below the root is called the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.llava_video_178k import subset
from tests.support.pipeline_rows import empty_files
from vlm_pg.errors import SampleError


def dataset_of(name: str) -> DataSet:
    found: DataSet = getattr(importlib.import_module(f"data_pipelines.{name}"), name.upper())
    return found


CUP, FALL, SITS = "video_10000.mp4", "0101/17.mp4", "6H78U.mp4"
LONG, PLOT, ANGLE = "longvila_videos/5nKz1hzvSqs.mp4", "images/7.jpg", "test/1/img_diagram.png"


@pytest.mark.parametrize(
    ("name", "path", "others"),
    [
        ("clevrer", CUP, [f"perception_test/videos/{CUP}", f"videos/{CUP}", f"MVBench/{CUP}"]),
        ("perception_test", CUP, [f"clevrer/video_validation/video_10000-11000/{CUP}", f"other/videos/{CUP}"]),
        ("nextqa", FALL, ["other/17.mp4", "NExTVideo/0202/17.mp4", "other/0101/17.mp4"]),
        ("nextqa", "17.mp4", ["other/17.mp4", "0101/17.mp4"]),
        ("star", SITS, [f"elsewhere/{SITS}", f"Charades_v1_trimmed/{SITS}"]),
        ("charades_sta", SITS, [f"elsewhere/{SITS}"]),
        ("longvideo_reason", LONG, ["other/5nKz1hzvSqs.mp4", "other/deep/5nKz1hzvSqs.mp4"]),
        ("video_r1", f"CLEVRER/{CUP}", [f"other/CLEVRER/{CUP}", CUP]),
        ("mathvista", PLOT, [f"other/{PLOT}", "7.jpg"]),
        ("geometry3k", ANGLE, [f"old/{ANGLE}", "img_diagram.png"]),
    ],
)
def test_a_file_of_another_set_is_not_taken_for_a_missing_one(
    tmp_path: Path, name: str, path: str, others: list[str]
) -> None:
    empty_files(tmp_path, *others)
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == path
    assert not (tmp_path / path).exists()


@pytest.mark.parametrize(
    ("name", "path", "where"),
    [
        ("clevrer", CUP, f"clevrer/video_validation/video_10000-11000/{CUP}"),
        ("clevrer", CUP, f"video_10000-11000/{CUP}"),
        ("perception_test", CUP, f"perception_test/videos/{CUP}"),
        ("perception_test", CUP, f"valid_videos/{CUP}"),
        ("nextqa", FALL, f"raw/NExTVideo/{FALL}"),
        ("nextqa", FALL, "NExTVideo/17.mp4"),
        ("nextqa", "17.mp4", f"NExTVideo/{FALL}"),
        ("star", SITS, f"Charades_v1_480/{SITS}"),
        ("longvideo_reason", LONG, "longvideo_eval_videos/longvideo_eval_subset3/5nKz1hzvSqs.webm"),
        ("mathvista", PLOT, f"data/{PLOT}"),
        ("geometry3k", ANGLE, f"data/geometry3k/{ANGLE}"),
    ],
)
def test_the_right_file_is_taken_whatever_else_is_called_so(tmp_path: Path, name: str, path: str, where: str) -> None:
    empty_files(tmp_path, where, *(f"{folder}/{Path(path).name}" for folder in ("a", "other", "zz/deep")))
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == where


@pytest.mark.parametrize(
    ("name", "root", "path", "where"),
    [
        ("nextqa", "NExTVideo", "17.mp4", FALL),
        ("clevrer", "video_train", CUP, f"video_10000-11000/{CUP}"),
        ("longvideo_reason", "longvila_videos", LONG, "5nKz1hzvSqs.mp4"),
        ("longvideo_reason", "anything", LONG, "5nKz1hzvSqs.mkv"),
        ("perception_test", "anything", CUP, "video_10000.MP4"),
        ("mathvista", "data", PLOT, PLOT),
    ],
)
def test_the_root_may_be_the_folder_of_the_media(tmp_path: Path, name: str, root: str, path: str, where: str) -> None:
    empty_files(tmp_path / root, where)
    assert MediaFinder(tmp_path / root, dataset_of(name)).path_of(path) == where


@pytest.mark.parametrize(("name", "path", "folder"), [("mathvista", PLOT, "data"), ("geometry3k", ANGLE, "geometry3k")])
def test_what_lies_in_the_root_is_no_file_of_a_folder_that_lacks_it(
    tmp_path: Path, name: str, path: str, folder: str
) -> None:
    finder = MediaFinder(tmp_path, dataset_of(name))
    empty_files(tmp_path, path, f"{folder}/of-another-kind.txt")
    assert finder.path_of(path) == path
    (tmp_path / folder / Path(path).parts[0]).mkdir()
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == f"{folder}/{path}"


def test_several_files_of_one_name_are_refused(tmp_path: Path) -> None:
    empty_files(tmp_path, *(f"longvideo_eval_subset{number}/5nKz1hzvSqs.mp4" for number in range(4)))
    with pytest.raises(SampleError, match=r"may be longvideo_eval_subset0/5nK.* \.\.\.\. One file") as error:
        MediaFinder(tmp_path, dataset_of("longvideo_reason")).path_of(LONG)
    assert error.value.reason == "ambiguous_media"


def test_of_several_files_that_in_most_of_the_wanted_folders_is_meant(tmp_path: Path) -> None:
    empty_files(tmp_path, "NExTVideo/17.mp4", f"NExTVideo/part1/{FALL}")
    assert MediaFinder(tmp_path, dataset_of("nextqa")).path_of(FALL) == f"NExTVideo/part1/{FALL}"


def test_of_the_sizes_of_charades_the_first_is_preferred(tmp_path: Path) -> None:
    empty_files(tmp_path, f"Charades_v1/{SITS}", f"Charades_v1_480/{SITS}", SITS)
    assert MediaFinder(tmp_path, dataset_of("star")).path_of(SITS) == f"Charades_v1_480/{SITS}"


@pytest.mark.parametrize(
    ("path", "files", "expected"),
    [
        ("1.mp4", ["clips/a/1.mp4", "1.mp4"], "clips/a/1.mp4"),
        ("1.mp4", ["clips/a/2.mp4", "1.mp4"], "clips/1.mp4"),
        ("1.mp4", ["clips/a/1.mkv"], "clips/1.mp4"),
        ("a/1.mp4", ["clips/a/1.mp4", "clips/b/1.mp4", "a/1.mp4"], "clips/a/1.mp4"),
        ("a/1.mp4", ["clips/a/2.mp4", "a/1.mp4", "other/1.mp4"], "clips/a/1.mp4"),
        ("clips/a/1.mp4", ["clips/a/1.mp4"], "clips/a/1.mp4"),
        ("old/1.mp4", ["old/1.mp4", "clips/a/1.mp4"], "old/1.mp4"),
        ("b/1.mp4", ["more/b/1.mp4", "clips/a/b/2.mp4"], "more/b/1.mp4"),
        ("a/1.mp4", ["clips/a/1.mp4", "more/a/1.mp4"], "ambiguous_media"),
    ],
)
def test_paths_start_from_the_folders_that_a_map_names(
    tmp_path: Path, path: str, files: list[str], expected: str
) -> None:
    empty_files(tmp_path, *files)
    (tmp_path / "clips").mkdir(exist_ok=True)
    try:
        found = MediaFinder(tmp_path, DataSet("mine", (), ("clips/**", "more"), by_name=False)).path_of(path)
    except SampleError as error:
        found = error.reason
    assert found == expected


def test_the_root_may_be_one_of_the_folders(tmp_path: Path) -> None:
    empty_files(tmp_path, "a/1.mp4", "clips/a/2.mp4")
    finder = MediaFinder(tmp_path, DataSet("mine", (), (".", "clips"), by_name=False))
    assert [finder.path_of(f"a/{number}.mp4") for number in (1, 2)] == ["a/1.mp4", "clips/a/2.mp4"]


def test_what_no_path_below_the_root_is_stays_as_it_is_written(tmp_path: Path) -> None:
    empty_files(tmp_path, CUP)
    finder = MediaFinder(tmp_path / "root", dataset_of("clevrer"))
    for path in (f"../{CUP}", f"{tmp_path}/{CUP}", f"http://a.example/{CUP}", " ", "x" * 300 + ".mp4", "a\0.mp4"):
        assert finder.path_of(path).strip() == path.strip()
    own = MediaFinder(tmp_path / "root", dataset_of("vsi")).path_of
    assert own(f"../{CUP}", "VSI-Bench", tmp_path) == f"VSI-Bench/../{CUP}"
    assert own(f"/etc/{CUP}", "VSI-Bench", tmp_path) == f"/etc/{CUP}"


SCENE, OWN, OTHER = "scannet/scene0191_00.mp4", "VSI-Bench", "VSI-590K"


@pytest.mark.parametrize(
    ("root", "annotations", "files", "expected"),
    [
        (".", OWN, [f"{OWN}/{SCENE}", f"{OTHER}/{SCENE}", SCENE], f"{OWN}/{SCENE}"),
        (".", OWN, [f"{OTHER}/{SCENE}", SCENE], f"{OWN}/{SCENE}"),
        (".", f"{OTHER}/..", [f"{OTHER}/{SCENE}", SCENE], SCENE),
        (".", "notes", [f"{OWN}/{SCENE}", f"notes/{SCENE}"], f"{OWN}/{SCENE}"),
        (".", "bench", [f"bench/{SCENE}", SCENE], f"bench/{SCENE}"),
        (".", f"deep/{OWN}", [f"{OWN}/{SCENE}"], f"deep/{OWN}/{SCENE}"),
        (OWN, "notes", [f"{OWN}/{SCENE}"], SCENE),
        (OTHER, OWN, [f"{OTHER}/{SCENE}"], f"{OWN}/{SCENE}"),
        ("media", OWN, [f"media/{SCENE}"], f"{OWN}/{SCENE}"),
        ("media", "media", [f"media/{SCENE}"], SCENE),
        ("media", "media", [], SCENE),
    ],
)
def test_a_form_with_one_folder_takes_files_of_that_alone(
    tmp_path: Path, root: str, annotations: str, files: list[str], expected: str
) -> None:
    empty_files(tmp_path, *files)
    (tmp_path / annotations).mkdir(parents=True, exist_ok=True)
    finder = MediaFinder(tmp_path / root, dataset_of("vsi"))
    assert finder.path_of(SCENE, OWN, tmp_path / annotations) == expected


def test_the_subset_of_a_row_is_the_folder_of_its_file_or_what_the_row_says(tmp_path: Path) -> None:
    row = {"data_source": "30_60_s_nextqa"}
    assert subset(row, tmp_path / "1_2_m_youtube_v0_1") == "1_2_m_youtube_v0_1"
    assert subset(row, tmp_path / "annotations") == "30_60_s_nextqa"
    for odd in ({"data_source": "../x"}, {"data_source": None}, {"data_source": "academic"}):
        assert subset(odd, tmp_path / "annotations") == "annotations"


def test_a_folder_of_pictures_is_found_and_open_as_a_file_is(tmp_path: Path) -> None:
    frames = "tvqa/frames_fps3_hq/castle_s07e05"
    empty_files(tmp_path, "video/tvqa/frames_fps3_hq/other/00001.jpg", f"MVBench/video/{frames}/00001.jpg")
    assert MediaFinder(tmp_path, dataset_of("mvbench")).path_of(frames) == f"MVBench/video/{frames}"
    empty_files(tmp_path, f"video/{frames}/00001.jpg")
    with pytest.raises(SampleError) as caught:
        MediaFinder(tmp_path, dataset_of("mvbench")).path_of(frames)
    assert caught.value.reason == "ambiguous_media"
