"""Layouts that people and mirrors give the sets' media: found where it is certain whose a file is, else refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipelines import clevrer
from data_pipelines.engine.annotation_files import count_rows
from data_pipelines.engine.judging import Source
from data_pipelines.engine.media_finder import MediaFinder
from data_pipelines.llava_video_178k import LLAVA_VIDEO_178K
from data_pipelines.vsi import VSI
from tests.support.pipeline_rows import empty_files
from tests.unit.data_pipelines.test_finding import dataset_of
from vlm_pg.errors import SampleError

EARLY, BOTH, LATE = "video_00428.mp4", "video_10428.mp4", "video_13428.mp4"
FALL, SITS, ID = "0101/2909445186.mp4", "6H78U.mp4", "2909445186.mp4"
LONG = "longvila_videos/5nKz1hzvSqs.mp4"
THOUSAND = "video_10000-11000"

FOUND = [
    ("clevrer", EARLY, f"videos/train/video_00000-01000/{EARLY}", []),
    ("clevrer", EARLY, f"train/video_00000-01000/{EARLY}", []),
    ("clevrer", EARLY, f"videos/video_00000-01000/{EARLY}", []),
    ("clevrer", EARLY, f"clevrer/video_00000-01000/{EARLY}", []),
    ("clevrer", EARLY, f"train_video/video_00000-01000/{EARLY}", []),
    ("clevrer", EARLY, f"train/{EARLY}", []),
    ("clevrer", EARLY, f"videos/train/{EARLY}", []),
    ("clevrer", "video_15001.mp4", "test_videos/video_15001.mp4", []),
    *[("clevrer", BOTH, f"{split}/{THOUSAND}/{BOTH}", []) for split in ("val", "validation", "validation_video")],
    *[("clevrer", BOTH, f"{split}/{BOTH}", [f"{split}/{LATE}"]) for split in ("val", "videos/validation", "valid")],
    ("clevrer", EARLY, f"Videos/train/{EARLY}", [f"my_renders/train/{EARLY}"]),
    ("clevrer", EARLY, f"CLEVRER_v1/train/{EARLY}", []),
    ("perception_test", "video_0.mp4", "Perception_Test/videos/a/b/video_0.mp4", ["videos/OTHER/video_0.mp4"]),
    ("perception_test", "video_0.mp4", "train/videos/part2/video_0.mp4", []),
    ("clevrer", BOTH, f"clevrer/val/{BOTH}", [f"videos/{BOTH}"]),
    ("clevrer", BOTH, f"clevrer/video_validation/{BOTH}", [f"perception/videos/{BOTH}"]),
    *[
        ("perception_test", BOTH, f"{place}/{BOTH}", [f"video_validation/{THOUSAND}/{BOTH}"])
        for place in ("validation/videos", "valid/videos", "train/videos", "data/videos", "videos", "val_videos")
    ],
    ("perception_test", BOTH, f"videos/part1/{BOTH}", [f"videos/{THOUSAND}/{BOTH}", f"videos/clevrer/val/{BOTH}"]),
    ("perception_test", "video_428.mp4", "videos/video_428.mp4", [f"videos/{EARLY}"]),
    *[
        (name, SITS, f"{place}/{SITS}", [])
        for name in ("star", "charades_sta")
        for place in ("Charades_v1_480", "Charades_v1", "charades/Charades_v1_480", ".")
    ],
    *[
        ("star", SITS, f"{place}/{SITS}", [])
        for place in ("videos", "Charades", "a/Charades_v1_480", "a/b/Charades_v1")
    ],
    *[
        ("clevrer", "video_10000.mp4", f"{place}/video_10000.mp4", ["video_train/video_00000-01000/video_01000.mp4"])
        for place in (f"video_validation/{THOUSAND}", "clevrer/video_validation", THOUSAND, ".")
    ],
    *[
        ("perception_test", "video_10309.mp4", where, [])
        for where in ("videos/video_10309.mp4", "valid/videos/video_10309.mp4", "video_10309.MP4")
    ],
    *[("charades_sta", SITS, f"{place}/{SITS}", [f"a/{SITS}"]) for place in ("videos", "Charades", "charades")],
    ("charades_sta", SITS, "videos/6H78U.mkv", [f"videos/trimmed/{SITS}"]),
    *[
        ("nextqa", path, f"{place}/{path}", [f"other/{path}"])
        for place in ("videos", "nextqa/videos", "VidOR/video")
        for path in (FALL, ID)
    ],
    ("nextqa", ID, f"videos/{FALL}", []),
    ("nextqa", FALL, f"videos/{ID}", []),
    ("nextqa", FALL, f"videos/{FALL}", [f"videos/0202/{ID}"]),
    ("nextqa", ID, f"a/b/NExTVideo/{FALL}", []),
    ("longvideo_reason", LONG, "videos/5nKz1hzvSqs.webm", ["videos/x/5nKz1hzvSqs.mp4"]),
]


@pytest.mark.parametrize(("name", "path", "where", "others"), FOUND)
def test_usual_layouts_are_found(tmp_path: Path, name: str, path: str, where: str, others: list[str]) -> None:
    empty_files(tmp_path, where, *others)
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == where.removeprefix("./")


@pytest.mark.parametrize(
    ("name", "root", "path", "where"),
    [
        ("clevrer", "train", EARLY, f"video_00000-01000/{EARLY}"),
        ("clevrer", "videos", EARLY, f"train/{EARLY}"),
        ("clevrer", "clevrer", BOTH, f"val/{BOTH}"),
        ("perception_test", "validation", BOTH, f"videos/{BOTH}"),
        ("star", "videos", SITS, SITS),
        ("charades_sta", "Charades", SITS, "Charades_v1_480/6H78U.mp4"),
        ("charades_sta", "anything", SITS, SITS),
        ("nextqa", "nextqa/videos", ID, FALL),
        ("nextqa", "nextqa/videos", FALL, FALL),
        ("nextqa", "nextqa/videos", FALL, ID),
        ("nextqa", "nextqa/videos", ID, ID),
        ("nextqa", "NExTQA", ID, f"videos/{FALL}"),
    ],
)
def test_the_root_may_be_any_of_these_folders(tmp_path: Path, name: str, root: str, path: str, where: str) -> None:
    empty_files(tmp_path / root, where)
    assert MediaFinder(tmp_path / root, dataset_of(name)).path_of(path) == where


@pytest.mark.parametrize(
    ("name", "path", "files"),
    [
        ("clevrer", BOTH, [f"val/{BOTH}"]),  # Perception Test has a video of this name, and has none of 12000 or more
        ("clevrer", BOTH, [f"val/{BOTH}", f"val/{LATE}", "val/video_7.mp4"]),
        ("clevrer", BOTH, [f"train/{BOTH}", f"train/{EARLY}"]),
        ("clevrer", BOTH, [f"train/videos/{BOTH}", f"train/videos/{LATE}"]),
        ("clevrer", BOTH, [f"videos/{BOTH}"]),
        ("clevrer", EARLY, [f"my_renders/train/{EARLY}"]),
        ("clevrer", EARLY, [f"my_renders/train_videos/{EARLY}"]),
        ("perception_test", "video_0.mp4", ["videos/OTHER/video_0.mp4"]),
        ("perception_test", "video_0.mp4", ["validation/videos/OTHER/video_0.mp4", "data/videos/OTHER/video_0.mp4"]),
        ("perception_test", "video_0.mp4", ["videos/part1/OTHER/video_0.mp4"]),
        ("clevrer", EARLY, [f"video_00000-01000/masks/{EARLY}"]),
        ("clevrer", BOTH, [f"videos/video_11000-12000/{BOTH}"]),
        ("clevrer", EARLY, [f"videos/{EARLY}", f"clevrer/val/{EARLY}"]),
        ("perception_test", BOTH, [f"videos/val/{THOUSAND}/{BOTH}"]),
        ("perception_test", BOTH, [f"videos/{THOUSAND}/{BOTH}"]),
        ("perception_test", BOTH, [f"videos/{BOTH}", f"videos/{EARLY}"]),
        ("perception_test", BOTH, [f"videos/val/{BOTH}", f"videos/val/{LATE}"]),
        ("perception_test", BOTH, [f"videos/video_validation/{BOTH}", f"clevrer/videos/{BOTH}"]),
        ("star", SITS, [f"videos/clips/{SITS}", f"Charades/clips/{SITS}"]),
        ("nextqa", FALL, [f"videos/0202/{ID}"]),
        ("nextqa", ID, [f"videos/other/{ID}", f"videos/0101/deep/{ID}", f"videos/0101/0202/{ID}"]),
        ("longvideo_reason", LONG, ["videos/x/5nKz1hzvSqs.mp4"]),
    ],
)
def test_what_may_be_another_sets_is_not_taken(tmp_path: Path, name: str, path: str, files: list[str]) -> None:
    empty_files(tmp_path, *files)
    assert MediaFinder(tmp_path, dataset_of(name)).path_of(path) == path


@pytest.mark.parametrize(("name", "folder"), [("clevrer", "train"), ("perception_test", "videos")])
def test_what_lies_beside_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    """Not for each of a folder's ten thousand videos."""
    number, looks, count = clevrer._number, [0], 60
    monkeypatch.setattr(clevrer, "_number", lambda stem: looks.__setitem__(0, looks[0] + 1) or number(stem))
    first = 0 if name == "clevrer" else 10_000  # of Perception Test's names those that both have
    names = [f"video_{one:05d}.mp4" for one in range(first, first + count)]
    empty_files(tmp_path, *(f"{folder}/{one}" for one in names))
    finder = MediaFinder(tmp_path, dataset_of(name))
    assert [finder.path_of(one) for one in names] == [f"{folder}/{one}" for one in names]
    assert looks[0] < 10 * count


def test_a_name_in_two_folders_of_four_digits_is_refused(tmp_path: Path) -> None:
    empty_files(tmp_path, f"videos/0101/{ID}", f"videos/0202/{ID}")
    with pytest.raises(SampleError, match="One file of that name"):
        MediaFinder(tmp_path, dataset_of("nextqa")).path_of(ID)


SCENE, BENCH, OTHER = "scannet/scene0191_00.mp4", "VSI-Bench", "VSI-590K"
SUBSET, SECOND = "0_30_s_nextqa", "30_60_s_nextqa"


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
def test_the_root_is_a_sets_one_folder_under_another_name_where_no_other_is_meant(
    tmp_path: Path, root: str, files: list[str], only: str | None, expected: str
) -> None:
    empty_files(tmp_path / root, *files)
    assert MediaFinder(tmp_path / root, LLAVA_VIDEO_178K, only).path_of(SCENE, SUBSET, tmp_path) == expected


@pytest.mark.parametrize(
    ("root", "annotations", "files", "expected"),
    [
        # What lies in a folder of any name may be the other set's, which has videos of the same paths.
        ("bench", "ann", [SCENE, "test.jsonl"], f"{OTHER}/{SCENE}"),
        ("bench", "ann", [SCENE, f"vsi590k/{SCENE}"], f"vsi590k/{SCENE}"),
        ("bench", "ann", [SCENE, "vsi590k/scannet/other.mp4"], f"vsi590k/{SCENE}"),
        ("bench", "ann", [SCENE, "vsi590k/x.mp4"], f"vsi590k/{SCENE}"),
        ("media", "ann", [f"{OTHER}/{SCENE}", f"vsi590k/{SCENE}"], f"{OTHER}/{SCENE}"),
        ("media", "ann", [f"VSI_590K-videos/{SCENE}", f"vsi_bench/{SCENE}"], f"VSI_590K-videos/{SCENE}"),
        ("media", "ann", [f"vsi590k/{SCENE}", f"vsi-590k/{SCENE}"], "ambiguous_media"),
        ("media", "ann", [f"vsi590k/{SCENE}", "vsi-590k/scannet/x.mp4"], f"vsi590k/{SCENE}"),
        ("vsi_590k", "ann", [SCENE], SCENE),
        ("vsi_bench", "ann", [SCENE], f"{OTHER}/{SCENE}"),
        ("vsi_bench", "vsi_bench", [SCENE], f"{OTHER}/{SCENE}"),
        ("media", "media/vsi-bench", [f"vsi-bench/{SCENE}"], f"{OTHER}/{SCENE}"),
        ("media", "media/vsi_590k_notes", [f"vsi590k/{SCENE}"], f"vsi590k/{SCENE}"),
        ("media", "media/any", [f"any/{SCENE}"], f"any/{SCENE}"),
    ],
)
def test_each_of_two_sets_takes_what_lies_in_a_folder_of_its_own_name(
    tmp_path: Path, root: str, annotations: str, files: list[str], expected: str
) -> None:
    empty_files(tmp_path / root, *files)
    (tmp_path / annotations).mkdir(parents=True, exist_ok=True)
    try:
        found = MediaFinder(tmp_path / root, VSI, OTHER).path_of(SCENE, OTHER, tmp_path / annotations)
    except SampleError as error:
        found = error.reason
    assert found == expected


@pytest.mark.parametrize(
    ("folders", "only"), [((0, 0), OTHER), ((1, 1), BENCH), ((0, 1), None)], ids=["590k", "bench", "both"]
)
def test_which_folder_all_rows_are_in_is_read_of_their_files(
    tmp_path: Path, folders: tuple[int, int], only: str | None
) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text('{"video": "x"}\n7\n')
    sources = [Source(path, form, "", "train") for path, form in zip(paths, folders, strict=True)]
    assert count_rows(VSI, sources) == (dict.fromkeys(paths, 2), only)


@pytest.mark.parametrize(("second", "only"), [("0_30_s_nextqa", "0_30_s_nextqa"), ("30_60_s_nextqa", None)])
def test_so_are_the_subsets_of_rows(tmp_path: Path, second: str, only: str | None) -> None:
    path = tmp_path / "rows.json"
    rows = ", ".join(f'{{"data_source": "{name}"}}' for name in ("0_30_s_nextqa", second))
    path.write_text(f'[{rows}, {{"video": "no source"}}]')
    assert count_rows(LLAVA_VIDEO_178K, [Source(path, 0, "", "train")]) == ({path: 3}, only)


EVALUATION_ONLY = (
    "aime2024",
    "amc2023",
    "longvideobench",
    "mathvista",
    "mmvu",
    "mvbench",
    "tempcompass",
    "video_mme",
    "video_mmmu",
)


@pytest.mark.parametrize("name", EVALUATION_ONLY)
def test_a_set_for_evaluation_has_no_training_files(name: str) -> None:
    assert all(set(form.files) == {"eval"} for form in dataset_of(name).forms)
