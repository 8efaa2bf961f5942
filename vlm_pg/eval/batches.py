"""Which questions are asked together: a function of the questions and settings alone, never of ranks or of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from vlm_pg.eval.contracts import cluster_of
from vlm_pg.media.sampling import FRAME_MULTIPLE, video_max_pixels
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import MediaRef, Sample

# Prompts of a batch are in memory at a time. A visual token has pixels of 19 kB (Qwen2.5-VL; float32), a batch 5 GB.
MOST_VISUAL_TOKENS_A_BATCH = 2**18


def batches_of(
    samples: Sequence[Sample],
    most_questions: int,
    tokens_of: Callable[[MediaRef], int],
    most_tokens: int = MOST_VISUAL_TOKENS_A_BATCH,
    shares_media: bool = True,
) -> list[list[Sample]]:
    """Questions in the order of the records, but for those on the same media, which follow the first of them.

    Questions on the same media are in one batch if it has room for all of them: they share decoding, pixels, visual
    features and the beginning of their prompts. So a batch may have fewer questions than it has room for.

    Args:
        most_questions: of a batch.
        tokens_of: most visual tokens that a medium may become.
        most_tokens: of the media of a batch, each counted once for all questions on it. A question alone may have more.
        shares_media: False where each question is shown frames of its own (controls): all count.
    """
    batches: list[list[Sample]] = []
    room = 0
    for group in _groups(samples, shares_media):
        cost = sum(map(tokens_of, group[0].media))
        if not batches or len(batches[-1]) + len(group) > most_questions or cost > room:
            batches.append([])
            room = most_tokens
        room -= cost
        for sample in group:
            if len(batches[-1]) == most_questions:
                batches.append([])
                room = most_tokens - cost
            batches[-1].append(sample)
    return batches


def most_visual_tokens(ref: MediaRef, media: MediaSettings, factor: int) -> int:
    """Visual tokens that a medium has at most, before anybody has looked at it.

    Args:
        factor: pixels of a visual token's side.
    """
    if ref.kind == "image":
        return media.image_max_pixels // factor**2
    frames = max(len(ref.times), FRAME_MULTIPLE) if ref.times else media.most_frames
    of_frame = video_max_pixels(frames, media.min_pixels, media.max_pixels, factor) / factor**2
    most = -(-frames // FRAME_MULTIPLE) * max(1, int(of_frame))
    return most if media.video_tokens is None else min(most, media.video_tokens)


def _groups(samples: Sequence[Sample], shares_media: bool) -> Iterator[list[Sample]]:
    """Questions on the same media together, those on parts of one file behind each other."""
    files: dict[str, int] = {}
    parts: dict[tuple[str, tuple[MediaRef, ...]], int] = {}
    for place, sample in enumerate(samples):
        files.setdefault(cluster_of(sample), place)
        parts.setdefault(_part(sample), place)
    ordered = sorted(samples, key=lambda sample: (files[cluster_of(sample)], parts[_part(sample)]))
    for _, group in groupby(ordered, _part):
        together = list(group)
        yield from [together] if shares_media else ([sample] for sample in together)


def _part(sample: Sample) -> tuple[str, tuple[MediaRef, ...]]:
    return cluster_of(sample), sample.media
