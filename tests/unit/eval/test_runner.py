"""Questions on the same media are asked together, and the media of a batch stay within a bound; by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from vlm_pg.errors import SampleError
from vlm_pg.eval.batches import batches_of, max_visual_tokens
from vlm_pg.media.sampling import frames_within, visual_tokens
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef, Sample


def sample(name: str, *refs: MediaRef) -> Sample:
    return Sample(name, "What?", refs, (), "a", "free_form", "set", "kind")


def on(video: str, count: int, start: float | None = None) -> list[Sample]:
    return [sample(f"{video}{start or ''}{number}", MediaRef("video", video, start=start)) for number in range(count)]


def names(batches: Sequence[Sequence[Sample]]) -> list[list[str]]:
    return [[one.sample_id for one in batch] for batch in batches]


def ten(ref: MediaRef) -> int:
    return 10


def test_questions_on_one_video_are_not_split() -> None:
    samples = [*on("a", 3), *on("b", 2), *on("c", 1)]
    assert names(batches_of(samples, 4, ten)) == [["a0", "a1", "a2"], ["b0", "b1", "c0"]]
    # more than fit into a batch: as many as fit, the rest with the next question
    assert names(batches_of([*on("a", 5), *on("b", 1)], 4, ten)) == [["a0", "a1", "a2", "a3"], ["a4", "b0"]]
    assert names(batches_of(on("a", 4), 4, ten)) == [["a0", "a1", "a2", "a3"]]
    assert batches_of([], 4, ten) == []


def test_questions_follow_the_first_on_their_video_and_clips_of_a_file_each_other() -> None:
    whole, late, other = on("a", 2), on("a", 2, 5.0), on("b", 1)
    samples = [whole[0], *other, late[0], late[1], whole[1]]
    assert names(batches_of(samples, 5, ten)) == [["a0", "a1", "a5.00", "a5.01", "b0"]]
    assert names(batches_of(samples, 3, ten)) == [["a0", "a1"], ["a5.00", "a5.01", "b0"]]
    texts = [sample("x"), sample("y"), sample("z")]
    assert names(batches_of([*other, *texts], 3, ten)) == [["b0", "x", "y"], ["z"]]


def test_a_batch_has_media_of_so_many_tokens_each_counted_once() -> None:
    samples = [*on("a", 2), *on("b", 2), *on("c", 2), *on("d", 1)]
    assert names(batches_of(samples, 32, ten, max_tokens=20)) == [["a0", "a1", "b0", "b1"], ["c0", "c1", "d0"]]
    # one medium beyond the bound is asked by itself
    assert names(batches_of(samples, 32, ten, max_tokens=9)) == [["a0", "a1"], ["b0", "b1"], ["c0", "c1"], ["d0"]]
    # two media in one question
    pair = [sample("p", MediaRef("video", "a"), MediaRef("image", "i")), *on("b", 1)]
    assert names(batches_of(pair, 32, ten, max_tokens=29)) == [["p"], ["b0"]]
    assert names(batches_of(pair, 32, ten, max_tokens=30)) == [["p", "b0"]]


def test_frames_that_are_not_shared_all_count() -> None:
    samples = [*on("a", 2), *on("b", 1)]
    assert names(batches_of(samples, 32, ten, max_tokens=20, shares_media=False)) == [["a0", "a1"], ["b0"]]
    assert names(batches_of(samples, 32, ten, max_tokens=19, shares_media=False)) == [["a0"], ["a1"], ["b0"]]


def test_every_question_is_in_one_batch_whatever_the_limits() -> None:
    chance = random.Random(3)
    for _ in range(200):
        samples = [sample(str(n), MediaRef("video", chance.choice("abcde"))) for n in range(chance.randrange(30))]
        size, bound = chance.randint(1, 9), chance.randint(1, 60)
        batches = batches_of(samples, size, ten, bound)
        assert sorted(one.sample_id for batch in batches for one in batch) == sorted(one.sample_id for one in samples)
        assert all(0 < len(batch) <= size for batch in batches)
        assert all(10 * len({one.media for one in batch}) <= max(10, bound) for batch in batches)


@pytest.mark.parametrize(
    ("changes", "ref", "expected"),
    [
        ({}, MediaRef("video", "a"), 8 * 128),
        ({"max_frames": 17}, MediaRef("video", "a"), 8 * 128),
        ({"frames": "uniform", "num_frames": 6}, MediaRef("video", "a"), 3 * 128),
        ({"video_tokens": 500}, MediaRef("video", "a"), 500),
        ({"max_pixels": 9 * 28 * 28}, MediaRef("video", "a", times=(1.0, 2.0, 3.0)), 2 * 9),
        ({"max_pixels": 9 * 28 * 28}, MediaRef("video", "a", times=(1.0,)), 9),
        ({}, MediaRef("image", "a"), 1280),
        # qwen-vl-utils shares 115,200 tokens of a video among its frames: 2 * 115200 / 2048 = 112.5 of each
        ({"max_frames": 2048, "max_pixels": 768 * 28 * 28}, MediaRef("video", "a"), 1024 * 112),
    ],
)
def test_most_tokens_of_a_medium_by_its_settings(changes: dict[str, object], ref: MediaRef, expected: int) -> None:
    settings = MediaSettings(**changes)  # type: ignore[arg-type]
    assert max_visual_tokens(ref, settings, 28) == expected


@pytest.mark.parametrize("changes", [{}, {"max_frames": 768, "max_pixels": 600 * 784}, {"video_tokens": 700}])
def test_no_video_has_more_tokens_than_its_settings_allow(changes: dict[str, int]) -> None:
    """Sizes of real frames, from small to 4K, by the rule that chooses them (``media/sampling.py``)."""
    settings, chance = MediaSettings(**changes), random.Random(5)  # type: ignore[arg-type]
    most, seen = max_visual_tokens(MediaRef("video", "a"), settings, 28), 0
    for _ in range(300):
        stored = (chance.randint(64, 2160), chance.randint(64, 3840))
        count = 2 * chance.randint(settings.fewest_frames // 2, settings.most_frames // 2)
        bounds = (settings.min_pixels, settings.max_pixels)
        try:
            found = frames_within(count, settings.fewest_frames, stored, bounds, 28, settings.video_tokens)
        except SampleError:
            continue
        seen = max(seen, visual_tokens(*found, 28))
        assert visual_tokens(*found, 28) <= most
    assert seen > most / 2
