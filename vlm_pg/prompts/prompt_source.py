"""Samples in, prompts out: media are decoded ahead of time, finished prompts are cached while there is room. One source
per file of records, one pool of decoding processes behind them all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from vlm_pg.cache.settings import CacheSettings
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader, Ticket, decoding_pool, import_decoding
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.memory import tensor_bytes
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.types import BadSample, DecodedMedia, MediaRef, Prompt, Sample

# (media, sample id) -> media; controls tamper with the frames here.
Tamper = Callable[[DecodedMedia, str], DecodedMedia]


class PromptSource:
    """Prompts of samples. Media that several pending samples share are decoded once.

    Args:
        loaders: decode media, ahead of time where ``prefetch`` asks for it; by ``Sample.dataset``.
        builder: makes prompts of decoded media.
        where: location of faults of samples that have none of their own, e.g. the path of the records.
        check: raises SampleError for a prompt that the model cannot answer.
        cache_bytes: room for finished prompts, pixels included; the least recently used go first.
        scores: responses are scored, which takes a gold answer.
    """

    def __init__(
        self,
        loaders: Mapping[str, MediaLoader],
        builder: PromptBuilder,
        where: str,
        check: Callable[[Prompt], None] = lambda prompt: None,
        cache_bytes: int = 0,
        scores: bool = True,
    ):
        self._scores = scores
        self._loaders, self._builder, self._where, self._check = loaders, builder, where, check
        self._tickets: dict[str, Ticket] = {}
        # Of media that a sample still waits for: its questions share one decoding.
        self._under_way: WeakValueDictionary[tuple[str, tuple[MediaRef, ...]], Ticket] = WeakValueDictionary()
        self._cache: OrderedDict[str, Prompt] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._used_bytes = 0

    def prefetch(self, samples: Sequence[Sample]) -> None:
        """Start decoding media of samples that ``load`` will need soon."""
        self._prefetch([one for one in samples if one.sample_id not in self._cache])

    def _prefetch(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.sample_id not in self._tickets:
                self._tickets[sample.sample_id] = self._submit(sample)

    def expect(self, samples: Sequence[Sample]) -> None:
        """As ``prefetch``, and cancel stale prefetch requests of other samples."""
        wanted = {sample.sample_id for sample in samples}
        self._tickets = {name: ticket for name, ticket in self._tickets.items() if name in wanted}
        self.prefetch(samples)

    def load(
        self, samples: Sequence[Sample], tamper: Tamper | None = None, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[tuple[Sample, Prompt]], list[BadSample]]:
        """Prompts of the samples that can be used, in order, and why the others cannot.

        Raises:
            InterruptedError: ``should_stop`` returned True while media were being decoded.
        """
        self._prefetch([one for one in samples if tamper is not None or one.sample_id not in self._cache])
        good: list[tuple[Sample, Prompt]] = []
        bad: list[BadSample] = []
        for sample in samples:
            try:
                good.append((sample, self._prompt(sample, tamper, should_stop)))
            except SampleError as error:
                where = sample.where or self._where
                bad.append(BadSample(sample.sample_id, error.reason, str(error), where, error.trace))
        return good, bad

    def _submit(self, sample: Sample) -> Ticket:
        key = (sample.dataset, sample.media)
        ticket = self._under_way.get(key)
        if ticket is None:
            ticket = self._under_way[key] = self._loaders[sample.dataset].submit(sample.media)
        return ticket

    def _prompt(self, sample: Sample, tamper: Tamper | None, should_stop: Callable[[], bool]) -> Prompt:
        if self._scores:
            refuse_without_gold(sample)
        cached = self._cache.get(sample.sample_id) if tamper is None else None
        if cached is not None:
            self._cache.move_to_end(sample.sample_id)
            return cached
        ticket = self._tickets.pop(sample.sample_id, None) or self._submit(sample)
        media: list[DecodedMedia] = []
        for item in ticket.result(should_stop):
            if isinstance(item, SampleError):
                raise item
            media.append(item)
        if tamper is not None:
            media = [tamper(item, sample.sample_id) for item in media]
        prompt = self._builder.build(sample, media)
        self._check(prompt)
        if tamper is None and (size := _bytes(prompt)) <= self._cache_bytes:
            self._cache[prompt.sample_id] = prompt
            self._used_bytes += size
            while self._used_bytes > self._cache_bytes:
                _, oldest = self._cache.popitem(last=False)
                self._used_bytes -= _bytes(oldest)
        return prompt


def refuse_without_gold(sample: Sample) -> None:
    """Raise SampleError ("no_gold_answer") for a conversation without a gold answer."""
    if not sample.answer:
        raise SampleError(
            "no_gold_answer",
            "the record has the turns of a conversation and no gold answer ('solution'), so that no response to it can "
            "be scored. Add one, or train on the record with training.objective=sft.",
        )


def _bytes(prompt: Prompt) -> int:
    return tensor_bytes(prompt.pixel_values) + 8 * 5 * prompt.num_tokens + sum(frame.nbytes for frame in prompt.preview)


@dataclass(frozen=True)
class PromptOptions:
    """Media settings, builder and check of a set with prompts of its own: see ``SourcePool``."""

    media: MediaSettings
    builder: PromptBuilder
    check: Callable[[Prompt], None]


class SourcePool(AbstractContextManager["SourcePool"]):
    """Makes prompt sources and owns their decoding processes; a context manager.

    Args:
        builder: makes prompts of decoded media.
        data: media roots, and whether remote media are allowed.
        media: frames, sizes, limits, workers.
        factor: patch size times merge size of the vision tower, in pixels.
        check: raises SampleError for a prompt that the model does not support.
        pool: of ``decoding_pool(media, cache)``, if already started; closed with this.
        cache: of frames, if any.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        data: DataSettings,
        media: MediaSettings,
        factor: int,
        check: Callable[[Prompt], None] = lambda prompt: None,
        pool: WorkerPool | None = None,
        cache: CacheSettings | None = None,
    ):
        self._cache = cache
        self._data, self._factor = data, factor
        self._options = PromptOptions(media, builder, check)
        self._pool = decoding_pool(media, cache) if pool is None else pool
        self._loaders: dict[tuple[Path, str, bool], MediaLoader] = {}

    def for_training(self, cache_bytes: int = 0, scores: bool = True) -> PromptSource:
        """The source of the samples of ``data.train``."""
        options = self._options
        loaders = {name: self._loader(path, name, options) for name, path in self._data.train_sets.items()}
        return PromptSource(loaders, options.builder, self._data.train_shown, options.check, cache_bytes, scores)

    def for_records(
        self, records: Path, name: str = "", cache_bytes: int = 0, options: PromptOptions | None = None
    ) -> PromptSource:
        """The source of the samples in ``records``; ``name``: of the set; ``options``: by default as all others."""
        options = options or self._options
        loaders = {"": self._loader(records, name, options)}
        return PromptSource(loaders, options.builder, str(records), options.check, cache_bytes)

    def _loader(self, records: Path, name: str, options: PromptOptions) -> MediaLoader:
        root = self._data.root_for(records, name)
        key = (root, options.media.model_dump_json(), options.builder.reads_subtitles)
        if key not in self._loaders:
            self._loaders[key] = MediaLoader(
                options.media,
                root,
                self._data.allow_remote,
                self._factor,
                self._pool,
                options.builder.reads_subtitles,
                self._cache,
            )
        return self._loaders[key]

    @property
    def is_starting(self) -> bool:
        """Whether decoding processes have been started and none is ready."""
        return self._pool is not None and self._pool.is_starting

    def wait_until_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for started decoding processes, and import what the first file needs.

        Raises:
            InterruptedError: after ``should_stop``, which is polled.
        """
        if self._pool is not None and self._pool.is_started:
            import_decoding()
            self._pool.wait_until_ready(should_stop)

    def close(self) -> None:
        """End the decoding processes."""
        if self._pool is not None:
            self._pool.close()

    def __exit__(self, *error: object) -> None:
        self.close()
