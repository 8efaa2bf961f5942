"""Probing the media of judged questions once each: settings, worker processes, and the facts a question gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from data_pipelines.engine.output_folder import fingerprint
from data_pipelines.engine.resume import MediaBook, Spool, Verdict
from vlm_pg.config_files import describe, nearest_keys
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.progress import Bar
from vlm_pg.types import BadSample, MediaRef

if TYPE_CHECKING:
    from vlm_pg.media.decode_file import MediaFacts

# Without settings: a limit that a run may raise refuses nothing, a file that no run can read is at fault.
_LENIENT = {"max_video_seconds": 1e9, "max_header_pixels": 170_000_000, "deadline_seconds": 600.0}
# Per process: it always has a file waiting while this one writes results.
_IN_FLIGHT = 4


@dataclass(frozen=True)
class ProbedMedia:
    """Facts of media; none where they are not probed. ``pool``: the processes, for further media."""

    book: MediaBook | None = None
    pool: WorkerPool | None = None

    def with_facts(self, verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
        """The verdicts with facts of their media; questions whose media cannot be used are refused."""
        for one in verdicts:
            results = [] if self.book is None or one.sample is None else list(map(self.book.read, one.sample.media))
            fault = next((result for result in results if isinstance(result, SampleError)), None)
            if fault is not None and one.sample is not None:
                sample = one.sample
                bad = BadSample(sample.sample_id, fault.reason, str(fault), sample.where, fault.trace)
                yield replace(one, sample=None, refused=bad)
            else:
                facts = [facts for facts in results if facts is not None and not isinstance(facts, SampleError)]
                yield replace(one, facts=tuple(facts))


@dataclass(frozen=True)
class MediaCheck:
    """How media are probed.

    Args:
        root: the media root; None: they are not.
        settings: which frames, and within which limits.
        given: those of them that the command names.
        factor: sides of frames become its multiples.
        decode: decode all frames that would be shown, or one of each video.
    """

    root: Path | None
    settings: MediaSettings
    given: Sequence[str]
    factor: int
    decode: bool

    @property
    def identity(self) -> dict[str, Any]:
        """The part of this that the outcome depends on, as JSON values."""
        return {} if self.root is None else {"decode": self.decode, "media": sorted(self.given), "patch": self.factor}

    @property
    def shown(self) -> str:
        """The settings that numbers of visual tokens depend on, for people."""
        settings = self.settings
        sampled = "evenly" if settings.num_frames else f"{settings.fps:g} a second"
        frames = f"frames {sampled}, at most {settings.most_frames} of up to {settings.max_pixels:,} pixels"
        budget = "" if settings.video_tokens is None else f", {settings.video_tokens:,} tokens of a video"
        return f" ({frames}, images of up to {settings.image_max_pixels:,}{budget}, patches of {self.factor})"

    @contextmanager
    def probed(self, spool: Spool, parts: int) -> Iterator[ProbedMedia]:
        """Probe all media of a spool's first parts that were not probed with these settings before."""
        if self.root is None:
            yield ProbedMedia()
            return
        key = fingerprint({**self.identity, "settings": self.settings.model_dump(mode="json", exclude={"workers"})})
        pool = decoding_pool(self.settings)
        assert pool is not None
        with pool, closing(MediaBook(spool.folder / f"media-{key[:16]}.sqlite", self.root)) as book:
            pool.start()  # while this process imports what it needs
            loader = MediaLoader(self.settings, self.root, factor=self.factor, pool=pool)
            probe_all(spool.verdicts(parts), book, loader, self.decode)
            yield ProbedMedia(book, pool)


def media_settings(given: Sequence[str], workers: int) -> MediaSettings:
    """The settings of ``--media KEY=VALUE ...``; all others then have a run's defaults.

    Raises ConfigError: an unknown key or an invalid value.
    """
    import yaml

    if not given:
        return MediaSettings(**_LENIENT, workers=workers)
    values: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        key = key.strip().removeprefix("media.")
        if not equals or key not in MediaSettings.model_fields or key == "workers":
            near = nearest_keys(key, MediaSettings)
            raise ConfigError(
                f"--media has '{printable(one, 200)}'. KEY=VALUE is expected, where KEY is one of a run's 'media' "
                f"settings but workers, for example max_frames=64.{f' Did you mean {near[0]}?' if near else ''}"
            )
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[key] = text
    try:
        return MediaSettings(**values, workers=workers)
    except ValidationError as error:
        faults = describe(error, MediaSettings, {}, "--media")
        raise ConfigError("The settings of --media cannot be used:\n  " + "\n  ".join(faults)) from None


def probe_all(verdicts: Iterable[Verdict], book: MediaBook, loader: MediaLoader, decode: bool) -> None:
    """Probe the media of kept questions that the book has no result for.

    Args:
        decode: decode the frames that would be shown, or one of them.

    Raises OSError, sqlite3.OperationalError: the book cannot be written.
    """
    book.want(ref for one in verdicts if one.sample is not None for ref in one.sample.media)
    wanted, known = book.counts()
    with Bar("Decoding media" if decode else "Looking at media", wanted) as bar:
        bar.advance(known, redone=False)
        for ref, state, outcome in _probed(book, loader, decode):
            book.write(ref, state, outcome)
            bar.advance(1)


def _probed(
    book: MediaBook, loader: MediaLoader, decode: bool
) -> Iterator[tuple[MediaRef, str, MediaFacts | SampleError]]:
    """Medium, file state before the probe, and its result; as they complete."""
    unknown = book.unknown()
    waiting: dict[Future[MediaFacts], tuple[MediaRef, str]] = {}
    while True:
        refs = list(islice(unknown, _IN_FLIGHT * loader.workers - len(waiting)))
        if not refs and not waiting:
            return
        for ref in refs:
            state = book.state_of(ref)
            found = loader.probe(ref, decode)
            if isinstance(found, SampleError):
                yield ref, state, found
            else:
                waiting[found] = (ref, state)
        for done in wait(waiting, return_when=FIRST_COMPLETED).done if waiting else ():
            try:
                outcome: MediaFacts | SampleError = done.result()
            except SampleError as fault:
                outcome = fault
            yield *waiting.pop(done), outcome
