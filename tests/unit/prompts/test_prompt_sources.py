"""Samples in, prompts out: faults stay with their sample, prompts are cached while there is room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_pipelines.flashes import POSITIONS, SEEN_ORDERS, draw, encode_mp4, make_clips
from tests.support.groups import tiny_policy
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader, Ticket
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptSource, SourcePool
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.types import DecodedMedia, MediaRef, Prompt, Sample


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Two clips that can be read, and one that is not there."""
    made = []
    for index, clip in enumerate(make_clips(2, SEEN_ORDERS, POSITIONS, (7, 7))):
        encode_mp4(draw(clip), tmp_path / f"{index}.mp4")
        made.append(sample(str(index), f"{index}.mp4"))
    return [*made, sample("lost", "lost.mp4")]


def sample(name: str, path: str) -> Sample:
    options = ("A. red", "B. blue")
    return Sample(name, "Which?", (MediaRef("video", path),), options, "A", "multiple_choice", "test", "test")


def sources(tmp_path: Path, **check: object) -> SourcePool:
    policy = tiny_policy()
    builder = PromptBuilder(policy.processor, PromptSettings(), policy.positions)
    media = MediaSettings(min_frames=8, max_frames=8, min_pixels=3136, max_pixels=3136, workers=0)
    return SourcePool(builder, DataSettings(), media, 28, **check)


def open_source(folder: SourcePool, tmp_path: Path, cache_bytes: int = 0) -> PromptSource:
    return folder.for_records(tmp_path / "records.jsonl", cache_bytes=cache_bytes)


def test_good_samples_in_order_and_the_reason_for_the_other(tmp_path: Path, samples: list[Sample]) -> None:
    with sources(tmp_path) as folder:
        good, bad = open_source(folder, tmp_path).load([samples[1], samples[2], samples[0]])
    assert [s.sample_id for s, _ in good] == ["1", "0"]
    assert [prompt.sample_id for _, prompt in good] == ["1", "0"]
    ((fault),) = bad
    assert (fault.sample_id, fault.reason) == ("lost", "missing_media")
    assert str(fault).startswith(f"{tmp_path / 'records.jsonl'}: sample lost is left out (missing_media): ")


def test_prompts_are_cached_while_there_is_room(tmp_path: Path, samples: list[Sample]) -> None:
    with sources(tmp_path) as folder:
        source = open_source(folder, tmp_path, cache_bytes=10**7)
        first, _ = source.load(samples[:2])
        again, _ = source.load(samples[:2])
        assert all(a[1] is b[1] for a, b in zip(first, again, strict=True))
        pixels = first[0][1].pixel_values
        assert pixels is not None
        small = open_source(folder, tmp_path, cache_bytes=int(1.5 * pixels.numel() * 4))
        found = [small.load([samples[index]])[0][0][1] for index in (0, 1, 1, 0)]
        assert found[1] is found[2] and found[0] is not found[3]


def test_tampered_prompts_are_never_cached(tmp_path: Path, samples: list[Sample]) -> None:
    def blacken(media: DecodedMedia, name: str) -> DecodedMedia:
        return DecodedMedia(media.kind, media.frames * 0, media.frame_seconds, media.sampled_fps, media.decoder)

    with sources(tmp_path) as folder:
        source = open_source(folder, tmp_path, cache_bytes=10**7)
        ((_, black),), _ = source.load(samples[:1], tamper=blacken)
        ((_, plain),), _ = source.load(samples[:1])
        assert black.content_key != plain.content_key
        ((_, black_again),), _ = source.load(samples[:1], tamper=blacken)
        assert black_again.content_key == black.content_key


def test_a_prompt_the_model_cannot_answer_is_a_bad_sample(tmp_path: Path, samples: list[Sample]) -> None:
    def refuse(prompt: Prompt) -> None:
        raise SampleError("too_long_for_model", "too long")

    with sources(tmp_path, check=refuse) as folder:
        good, bad = open_source(folder, tmp_path).load(samples[:1])
    assert good == [] and bad[0].reason == "too_long_for_model"


def test_prefetched_media_are_decoded_once(tmp_path: Path, samples: list[Sample]) -> None:
    with sources(tmp_path) as folder:
        source = open_source(folder, tmp_path)
        source.prefetch(samples[:2])
        for file in tmp_path.glob("*.mp4"):
            file.unlink()  # decoded already: the files are not needed any more
        good, bad = source.load(samples[:2])
    assert len(good) == 2 and not bad


def test_media_of_several_questions_are_decoded_once(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[MediaRef, ...]] = []
    submit = MediaLoader.submit

    def counted(loader: MediaLoader, refs: tuple[MediaRef, ...]) -> Ticket:
        submitted.append(refs)
        return submit(loader, refs)

    monkeypatch.setattr(MediaLoader, "submit", counted)
    questions = [replace(samples[index], sample_id=str(number)) for number, index in enumerate((0, 0, 1, 0, 2, 2))]
    with sources(tmp_path) as folder:
        source = open_source(folder, tmp_path)
        good, bad = source.load(questions)
        assert submitted == [samples[index].media for index in (0, 1, 2)]
        assert good[0][1].pixel_values is good[1][1].pixel_values is not None
        assert {prompt.content_key for _, prompt in good} == {good[0][1].content_key, good[2][1].content_key}
        # each question on a file that is not there has its fault
        assert [(one.sample_id, one.reason) for one in bad] == [("4", "missing_media"), ("5", "missing_media")]
        # media that no sample waits for are decoded again
        source.load(questions[:1])
        assert len(submitted) == 4
        # a control's frames are each question's own
        (one, two), _ = source.load(questions[:2], tamper=by_name)
    assert len(submitted) == 5 and one[1].content_key != two[1].content_key


def by_name(media: DecodedMedia, name: str) -> DecodedMedia:
    return replace(media, frames=media.frames * 0 + int(name))


def test_equal_names_in_the_folders_of_two_sets_are_two_videos(tmp_path: Path) -> None:
    clips = [draw(clip) for clip in make_clips(2, SEEN_ORDERS, POSITIONS, (7, 7))]
    for name, clip in zip("ab", clips, strict=True):
        (tmp_path / name).mkdir()
        encode_mp4(clip, tmp_path / name / "0.mp4")
    policy = tiny_policy()
    builder = PromptBuilder(policy.processor, PromptSettings(), policy.positions)
    media = MediaSettings(min_frames=8, max_frames=8, min_pixels=3136, max_pixels=3136, workers=0)
    data = DataSettings(train={name: tmp_path / name / "records.jsonl" for name in "ab"})
    samples = [replace(sample(f"{name}/0", "0.mp4"), dataset=name) for name in "ab"]
    with SourcePool(builder, data, media, 28) as pool:
        good, bad = pool.for_training().load(samples)
        alone = [
            pool.for_records(tmp_path / name / "records.jsonl").load([sample("0", "0.mp4")])[0][0] for name in "ab"
        ]
    assert not bad and [prompt.content_key for _, prompt in good] == [prompt.content_key for _, prompt in alone]
    assert good[0][1].content_key != good[1][1].content_key
