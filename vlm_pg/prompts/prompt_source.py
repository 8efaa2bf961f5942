"""Samples in, prompts out: media are decoded ahead of time, finished prompts are kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader, Ticket
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
        where: how faults of samples name their place that do not say it themselves, e.g. the path of the records.
        check: raises SampleError for a prompt that the model cannot answer.
        cache_bytes: room for finished prompts, pixels included; the least recently used go first. 0 keeps none.
    """

    def __init__(
        self,
        loaders: Mapping[str, MediaLoader],
        builder: PromptBuilder,
        where: str,
        check: Callable[[Prompt], None] = lambda prompt: None,
        cache_bytes: int = 0,
    ):
        self._loaders, self._builder, self._where, self._check = loaders, builder, where, check
        self._tickets: dict[str, Ticket] = {}
        # Of media that a sample still waits for: its questions share one decoding.
        self._under_way: WeakValueDictionary[tuple[str, tuple[MediaRef, ...]], Ticket] = WeakValueDictionary()
        self._cache: OrderedDict[str, Prompt] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._used_bytes = 0

    def prefetch(self, samples: Sequence[Sample]) -> None:
        """Start decoding media of samples that ``load`` will need soon."""
        for sample in samples:
            if sample.sample_id not in self._cache and sample.sample_id not in self._tickets:
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
            InterruptedError: ``should_stop`` said so while media were being decoded.
        """
        if tamper is None:
            self.prefetch(samples)
        else:  # media are decoded again, also of prompts that are kept
            for sample in samples:
                if sample.sample_id not in self._tickets:
                    self._tickets[sample.sample_id] = self._submit(sample)
        good: list[tuple[Sample, Prompt]] = []
        bad: list[BadSample] = []
        for sample in samples:
            try:
                good.append((sample, self._prompt(sample, tamper, should_stop)))
            except SampleError as error:
                place = sample.where or self._where
                bad.append(BadSample(sample.sample_id, error.reason, str(error), place, error.trace))
        return good, bad

    def _submit(self, sample: Sample) -> Ticket:
        key = (sample.dataset, sample.media)
        ticket = self._under_way.get(key)
        if ticket is None:
            ticket = self._under_way[key] = self._loaders[sample.dataset].submit(sample.media)
        return ticket

    def _prompt(self, sample: Sample, tamper: Tamper | None, should_stop: Callable[[], bool]) -> Prompt:
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
        if tamper is None:
            self._keep(prompt)
        return prompt

    def _keep(self, prompt: Prompt) -> None:
        size = _bytes(prompt)
        if size > self._cache_bytes:
            return
        self._cache[prompt.sample_id] = prompt
        self._used_bytes += size
        while self._used_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._used_bytes -= _bytes(oldest)


def _bytes(prompt: Prompt) -> int:
    return tensor_bytes(prompt.pixel_values) + 8 * 5 * prompt.num_tokens + sum(frame.nbytes for frame in prompt.preview)
