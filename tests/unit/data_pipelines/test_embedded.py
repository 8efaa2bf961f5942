"""The embedded set: clips show what their records say; prepared once, the same every time, held-out orders apart."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipelines import embedded, flashes
from data_pipelines.flashes import (
    ALL_ORDERS,
    COLOURS,
    POSITIONS,
    SEEN_ORDERS,
    UNSEEN_ORDERS,
    Clip,
    draw,
    encode_mp4,
    make_clips,
)
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef, Sample

CONFIG = Path(__file__).parents[3] / "configs" / "embedded_task.yaml"


def colours_shown(frames: np.ndarray) -> list[str]:
    """The colour name of each frame: uint8 [8, 56, 56, 3], told from where the picture changes over time."""
    changing = frames.astype(float).std(axis=0).mean(axis=-1)
    shape = changing >= np.quantile(changing, 0.97)
    names = list(flashes._RGB)
    palette = np.array([flashes._RGB[name] for name in names], dtype=float)
    means = [frame[shape].mean(axis=0) for frame in frames]
    return [names[int(np.linalg.norm(palette - mean, axis=1).argmin())] for mean in means]


def test_seen_and_unseen_orders_are_all_orders_and_share_none() -> None:
    assert len(ALL_ORDERS) == 120 and len(UNSEEN_ORDERS) == 20 and len(SEEN_ORDERS) == 100
    assert set(SEEN_ORDERS) | set(UNSEEN_ORDERS) == set(ALL_ORDERS)
    assert not set(SEEN_ORDERS) & set(UNSEEN_ORDERS)


@pytest.mark.parametrize("orders", [SEEN_ORDERS, UNSEEN_ORDERS])
def test_no_colour_is_likelier_at_any_position(orders: tuple[flashes.Order, ...]) -> None:
    for index in range(4):
        counts = Counter(order[index] for order in orders)
        assert set(counts.values()) == {len(orders) // len(COLOURS)}


def test_the_set_of_colours_does_not_reveal_their_order() -> None:
    for orders in (SEEN_ORDERS, UNSEEN_ORDERS):
        first_given_set = Counter((frozenset(order), order[0]) for order in orders)
        assert len(set(first_given_set.values())) == 1 and len(first_given_set) == 5 * 4


def test_questions_are_right_and_balanced() -> None:
    clips = make_clips(1600, SEEN_ORDERS, POSITIONS, (3, 1))
    for clip in clips:
        assert sorted(clip.options) == sorted(clip.order)
        assert clip.options["ABCD".index(clip.answer)] == clip.order[POSITIONS.index(clip.position)]
    for counts in (Counter(clip.answer for clip in clips), Counter(clip.position for clip in clips)):
        assert len(counts) == 4 and min(counts.values()) > 320
    assert len({clip.options for clip in clips}) == 120


def test_a_small_set_uses_every_cell_once_before_any_twice() -> None:
    orders = SEEN_ORDERS[:2]
    clips = make_clips(64, orders, POSITIONS, (0, 0))
    assert set(Counter((clip.order, clip.position, clip.answer) for clip in clips).values()) == {2}


def test_equal_keys_give_equal_pixels_and_other_keys_do_not() -> None:
    first, again = (make_clips(3, SEEN_ORDERS, POSITIONS, (0, 1)) for _ in range(2))
    other = make_clips(3, SEEN_ORDERS, POSITIONS, (0, 2))
    assert first == again and first != other
    assert np.array_equal(draw(first[2]), draw(again[2]))
    assert not np.array_equal(draw(first[2]), draw(other[2]))


def test_each_colour_lasts_two_frames_in_the_stated_order() -> None:
    for clip in make_clips(40, ALL_ORDERS, POSITIONS, (5, 0)):
        assert colours_shown(draw(clip)) == [colour for colour in clip.order for _ in range(2)], clip


def test_position_size_and_background_vary() -> None:
    clips = make_clips(30, SEEN_ORDERS, POSITIONS, (6, 0))
    centres, areas, backgrounds = set(), set(), set()
    for clip in clips:
        frames = draw(clip).astype(float)
        shape = frames.std(axis=0).mean(axis=-1) > 25
        rows, columns = np.nonzero(shape)
        centres.add((int(rows.mean()), int(columns.mean())))
        areas.add(int(shape.sum()) // 20)
        backgrounds.add(int(frames[:, :2, :2].mean()) // 10)
    assert len(centres) > 20 and len(areas) > 10 and len(backgrounds) > 6


def test_all_frames_and_colours_survive_the_file_and_the_shipped_media_settings(tmp_path: Path) -> None:
    settings = MediaSettings(**yaml.safe_load(CONFIG.read_text())["media"] | {"workers": 0})
    clips = make_clips(12, ALL_ORDERS, POSITIONS, (7, 0))
    refs = [MediaRef("video", f"{index}.mp4") for index in range(len(clips))]
    for clip, ref in zip(clips, refs, strict=True):
        encode_mp4(draw(clip), tmp_path / ref.path)
    with MediaLoader(settings, tmp_path) as loader:
        decoded = loader.load(refs)
    for clip, media in zip(clips, decoded, strict=True):
        assert not isinstance(media, SampleError), media
        assert media.frames.shape == (8, 3, 56, 56)
        assert media.frame_seconds == tuple(index / 2 for index in range(8)) and media.sampled_fps == 2.0
        assert colours_shown(media.frames.transpose(0, 2, 3, 1)) == [colour for colour in clip.order for _ in range(2)]


SMALL = ("--train", "24", "--eval", "8")
NAMES = ("train", "eval_seen", "eval_unseen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("embedded") / "set"
    assert embedded.main(["--out", str(out), *SMALL]) == 0
    return out


def read(folder: Path, name: str) -> list[Sample]:
    samples, bad = read_records(folder / f"{name}.jsonl")
    assert not bad
    return samples


def test_records_name_existing_clips_and_categories(folder: Path) -> None:
    assert [len(read(folder, name)) for name in NAMES] == [24, 8, 8]
    for name in NAMES:
        for sample in read(folder, name):
            assert (folder / sample.media[0].path).is_file()
            assert sample.answer_kind == "multiple_choice" and len(sample.options) == 4
            assert sample.category == ("unseen order" if name == "eval_unseen" else "seen order")
            assert sample.question in {f"Which colour is shown {p}?" for p in ("first", "second", "third", "last")}


def test_no_clip_is_in_two_files(folder: Path) -> None:
    contents = [(folder / sample.media[0].path).read_bytes() for name in NAMES for sample in read(folder, name)]
    assert len(set(contents)) == len(contents) == 40


def test_held_out_orders_never_occur_in_training() -> None:
    by_name = {split.name: split for split in embedded.SPLITS}
    assert set(by_name["train"].orders) == set(by_name["eval_seen"].orders) == set(SEEN_ORDERS)
    assert set(by_name["eval_unseen"].orders) == set(UNSEEN_ORDERS)
    assert len({split.key for split in embedded.SPLITS}) == 3
    assert all(split.key < embedded.FIRST_FREE_KEY for split in embedded.SPLITS)


def test_equal_arguments_give_equal_files_and_another_seed_does_not(folder: Path, tmp_path: Path) -> None:
    embedded.main(["--out", str(tmp_path / "again"), *SMALL])
    embedded.main(["--out", str(tmp_path / "other"), *SMALL, "--seed", "1"])
    for name in NAMES:
        assert (tmp_path / "again" / f"{name}.jsonl").read_bytes() == (folder / f"{name}.jsonl").read_bytes()
        assert (tmp_path / "other" / f"{name}.jsonl").read_bytes() != (folder / f"{name}.jsonl").read_bytes()
        clip = read(folder, name)[3].media[0].path
        assert (tmp_path / "again" / clip).read_bytes() == (folder / clip).read_bytes()
        assert (tmp_path / "other" / clip).read_bytes() != (folder / clip).read_bytes()


def test_a_second_start_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert embedded.main(["--out", str(folder), *SMALL]) == 0
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert before == after
    assert "already prepared" in capsys.readouterr().out


def test_other_arguments_need_overwrite_which_leaves_nothing_of_before(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--eval", "2", "--train"]
    embedded.main([*arguments, "6"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has \{'train': 6\}, requested is \{'train': 4\}"):
        embedded.main([*arguments, "4"])
    embedded.main([*arguments, "4", "--overwrite"])
    assert len(list((tmp_path / "clips" / "train").iterdir())) == len(read(tmp_path, "train")) == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_preparation_is_completed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--out", str(tmp_path), "--train", "6", "--eval", "2"]
    written: list[Path] = []

    def stop_after_four(clip: Clip, path: Path) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path)
        write_clip(clip, path)

    write_clip = embedded.write_clip
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_clip", stop_after_four)
        with pytest.raises(KeyboardInterrupt):
            embedded.main(arguments)
    assert not (tmp_path / "manifest.json").exists() and not (tmp_path / "train.jsonl").exists()
    embedded.main(arguments)
    assert len(read(tmp_path, "train")) == 6 and (tmp_path / "manifest.json").exists()


def test_a_clip_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frames: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(flashes, "encode_mp4", fail)
    clip = make_clips(1, SEEN_ORDERS, ("first",), (0, 0))[0]
    with pytest.raises(OSError, match="disk full"):
        embedded.write_clip(clip, tmp_path / "0.mp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("--seed", "-1"), ("--train", "0"), ("--eval", "100000")])
def test_numbers_out_of_range_are_refused(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option} is {value}\. [01] to 99999 is allowed\. Choose"):
        embedded.main(["--out", str(tmp_path / "set"), option, value])
    assert not (tmp_path / "set").exists()


def test_two_processes_preparing_one_folder_end_in_one_complete_set(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_pipelines.embedded", "--out", str(tmp_path / "set"), *SMALL]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("already prepared" in output for output in outputs) == [False, True]
    assert (tmp_path / "set" / "train.jsonl").read_bytes() == (folder / "train.jsonl").read_bytes()
