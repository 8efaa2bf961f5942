"""The clips of the embedded set show what their records say, also after H.264."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipelines import flashes
from data_pipelines.flashes import (
    ALL_ORDERS,
    COLOURS,
    POSITIONS,
    SEEN_ORDERS,
    UNSEEN_ORDERS,
    draw,
    encode_mp4,
    make_clips,
)
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef

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
def test_no_colour_is_likelier_at_any_place(orders: tuple[flashes.Order, ...]) -> None:
    for place in range(4):
        counts = Counter(order[place] for order in orders)
        assert set(counts.values()) == {len(orders) // len(COLOURS)}


def test_which_colours_are_shown_does_not_tell_their_order() -> None:
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


def test_place_size_and_background_vary() -> None:
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
