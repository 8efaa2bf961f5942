"""Batches of questions that are sampled together, and sampling them while the next one is prepared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType

from vlm_pg.eval.answer_files import Row
from vlm_pg.eval.contracts import cluster_of
from vlm_pg.media.sampling import FRAME_MULTIPLE, video_max_pixels
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.prompt_source import PromptSource, Tamper
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.types import BadSample, MediaRef, Prompt, Rollout, Sample

# Batches are assigned to ranks whole, so that what is computed together is the same for any number of them.
MAX_BATCH_QUESTIONS = 32
# Prompts of a batch are in memory at a time. A visual token has pixels of 19 kB (Qwen2.5-VL; float32), a batch 5 GB.
MAX_BATCH_VISUAL_TOKENS = 2**18

# The rollouts of each prompt, and why some have none.
Sampled = tuple[list[tuple[Rollout, ...]], list[BadSample]]


@dataclass(frozen=True)
class SampledBatch:
    """A batch in one form, with the rollouts of each prompt. ``faults``: of questions without prompt or rollouts."""

    number: int
    form: int
    prompts: Sequence[tuple[Sample, Prompt]]
    rollouts: Sequence[tuple[Rollout, ...]]
    faults: Sequence[BadSample]


def batches_of(
    samples: Sequence[Sample],
    max_questions: int,
    tokens_of: Callable[[MediaRef], int],
    max_tokens: int = MAX_BATCH_VISUAL_TOKENS,
    shares_media: bool = True,
) -> list[list[Sample]]:
    """Questions in the order of the records, except that those on the same media follow the first of them.

    A function of questions and settings alone, never of ranks or of time. Questions on the same media are in one batch
    if it can hold all of them: they share decoding, pixels, visual features and the beginning of their prompts. So a
    batch may have fewer questions than ``max_questions``.

    Args:
        tokens_of: upper bound of the visual tokens of a medium.
        max_tokens: of the media of a batch, each counted once for all questions on it; one question may have more.
        shares_media: False where each question is shown frames of its own (controls): all count.
    """
    batches: list[list[Sample]] = []
    room = 0
    for group in _groups(samples, shares_media):
        cost = sum(map(tokens_of, group[0].media))
        if not batches or len(batches[-1]) + len(group) > max_questions or cost > room:
            batches.append([])
            room = max_tokens
        room -= cost
        for sample in group:
            if len(batches[-1]) == max_questions:
                batches.append([])
                room = max_tokens - cost
            batches[-1].append(sample)
    return batches


def max_visual_tokens(ref: MediaRef, media: MediaSettings, factor: int) -> int:
    """Upper bound of a medium's visual tokens, from settings alone; ``factor``: pixels of a visual token's side."""
    if ref.kind == "image":
        return media.image_max_pixels // factor**2
    frames = max(len(ref.times), FRAME_MULTIPLE) if ref.times else media.most_frames
    of_frame = video_max_pixels(frames, media.min_pixels, media.max_pixels, factor) / factor**2
    most = -(-frames // FRAME_MULTIPLE) * max(1, int(of_frame))
    return most if media.video_tokens is None else min(most, media.video_tokens)


def _groups(samples: Sequence[Sample], shares_media: bool) -> Iterator[list[Sample]]:
    """Questions on the same media together, those on parts of one file behind each other."""

    def part(sample: Sample) -> tuple[str, tuple[MediaRef, ...]]:
        return cluster_of(sample), sample.media

    files: dict[str, int] = {}
    parts: dict[tuple[str, tuple[MediaRef, ...]], int] = {}
    for index, sample in enumerate(samples):
        files.setdefault(cluster_of(sample), index)
        parts.setdefault(part(sample), index)
    ordered = sorted(samples, key=lambda sample: (files[cluster_of(sample)], parts[part(sample)]))
    for _, group in groupby(ordered, part):
        questions = list(group)
        yield from [questions] if shares_media else ([sample] for sample in questions)


def fault_of(row: Row) -> BadSample:
    """The fault of a question's row that has one."""
    reason, message = row["fault"]
    return BadSample(row["sample_id"], reason, message, row["where"], row["trace"])


def split_finished(
    batches: Sequence[Sequence[Sample]], finished: Mapping[str, Row]
) -> tuple[list[Row], list[Sequence[Sample]]]:
    """The rows of finished batches, and the batches that are sampled.

    An incomplete batch is sampled again as a whole, so that the same is computed together; one with a fault, too,
    which may have been repaired since.
    """
    rows: list[Row] = []
    remaining = []
    for batch in batches:
        found = [finished[sample.sample_id] for sample in batch if sample.sample_id in finished]
        if len(found) == len(batch) and all(row["fault"] is None for row in found):
            rows += found
        else:
            remaining.append(batch)
    return rows, remaining


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """Submits batches to a sampler, in order; a context manager, which cancels pending batches when something raises.

    Args:
        stop: makes the sampler raise; given for one that works in another process, which is called in a thread while
            the prompts of the next batch are made and outputs are read. None: it is called at once.
    """

    def __init__(self, sampler: Sampler, stop: Callable[[], None] | None):
        self._sampler, self._stop = sampler, stop
        self._thread = None if stop is None else ThreadPoolExecutor(1, "sampling")
        # Batches in flight while the next is made; their prompts are in memory.
        self.depth = 0 if stop is None else 1

    def submit(self, prompts: Sequence[Prompt], key: str) -> Callable[[], Sampled]:
        """Begin to sample. The returned function waits for the rollouts, and raises the sampler's exception."""
        if self._thread is not None:
            return self._thread.submit(self._sample, prompts, key).result
        sampled = self._sample(prompts, key)
        return lambda: sampled

    def run(
        self,
        batches: Sequence[Sequence[Sample]],
        source: PromptSource,
        key: str,
        finish: Callable[[SampledBatch], None],
        tampers: Sequence[Tamper | None] = (None,),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sample all batches, each in every form; media of the next batch are decoded meanwhile.

        Args:
            key: keys the random numbers, with the form and the samples' ids.
            finish: called with each batch and form, in order.
            tampers: one for each form.
        """
        pending: deque[tuple[int, int, list[tuple[Sample, Prompt]], list[BadSample], Callable[[], Sampled]]] = deque()

        def finish_first() -> None:
            number, form, prompts, faults, sampled = pending.popleft()
            rollouts, more = sampled()
            finish(SampledBatch(number, form, prompts, rollouts, [*faults, *more]))

        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                source.prefetch([*batch, *batches[number + 1]])
            for form, tamper in enumerate(tampers):
                prompts, faults = source.load(batch, tamper, should_stop)
                sampled = self.submit([prompt for _, prompt in prompts], f"{key}/{form}")
                pending.append((number, form, prompts, faults, sampled))
                del prompts, sampled  # free their pixels before the next are decoded
                while len(pending) > self.depth:
                    finish_first()
        while pending:
            finish_first()

    def _sample(self, prompts: Sequence[Prompt], key: str) -> Sampled:
        return self._sampler.generate(prompts, key), self._sampler.take_faults() or []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None or self._stop is None:
            return
        if error is not None:
            self._stop()
        self._thread.shutdown(cancel_futures=True)
