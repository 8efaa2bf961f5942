"""Decoding the media of judged questions once each: settings, worker processes, and the facts a question gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.output_folder import fingerprint
from data_pipelines.engine.resume import MediaBook, Spool
from vlm_pg.config_errors import nearest_keys
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.progress import Bar
from vlm_pg.types import BadSample, MediaRef, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts


@dataclass(frozen=True)
class Known:
    """What was learnt of media; nothing where nobody looked. ``pool``: the processes, for further media."""

    book: MediaBook | None = None
    pool: WorkerPool | None = None

    def with_media(self, verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
        """The verdicts with facts of their media; questions whose media cannot be used are refused."""
        return iter(verdicts) if self.book is None else with_media(verdicts, self.book)


@dataclass(frozen=True)
class MediaLook:
    """How media are looked at.

    Args:
        root: the media root; None: they are not.
        settings: which frames, and within which limits.
        factor: sides of frames become its multiples.
        decode: whether all frames that would be shown are decoded, or of each video one.
        identity: what of this decides about the outcome, as JSON values.
    """

    root: Path | None
    settings: MediaSettings
    factor: int
    decode: bool
    identity: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: DataSet, arguments: Arguments) -> MediaLook:
        """As the command asks for.

        Raises:
            ConfigError: ``--media`` cannot be used.
        """
        settings = media_settings(arguments.media, max(1, arguments.workers))
        factor, decode = arguments.patch, arguments.decode
        if dataset.media is None or arguments.skip_media_check:
            return cls(None, settings, factor, decode)
        identity = {"decode": decode, "media": sorted(arguments.media), "patch": factor}
        return cls(arguments.media_root, settings, factor, decode, identity)

    @property
    def shown(self) -> str:
        """What numbers of visual tokens hold for, for people."""
        return f" ({shown_settings(self.settings, self.factor)})"

    @contextmanager
    def at(self, spool: Spool, parts: int) -> Iterator[Known]:
        """Look at all media of a spool's first parts that were not looked at in this way before."""
        if self.root is None:
            yield Known()
            return
        way = fingerprint({**self.identity, "settings": self.settings.model_dump(mode="json", exclude={"workers"})})
        pool = decoding_pool(self.settings)
        assert pool is not None
        with pool, closing(MediaBook(spool.folder / f"media-{way[:16]}.sqlite", self.root)) as book:
            pool.start()  # while this process imports what it needs
            loader = MediaLoader(self.settings, self.root, factor=self.factor, pool=pool)
            probe_all(spool.verdicts(parts), book, loader, self.decode)
            yield Known(book, pool)


# For each process: it is never without a file while this one writes down what was found.
_IN_FLIGHT = 4


def probe_all(verdicts: Iterable[Verdict], book: MediaBook, loader: MediaLoader, decode: bool) -> None:
    """Look at the media of kept questions that the book does not know.

    Args:
        verdicts: of all parts.
        book: knows, and gets to know.
        loader: reads them.
        decode: whether the frames that would be shown are decoded, or one of them.

    Raises:
        OSError, sqlite3.OperationalError: the book cannot be written.
    """
    book.want(ref for one in verdicts if one.sample is not None for ref in one.sample.media)
    wanted, known = book.counts()
    with Bar("Decoding media" if decode else "Looking at media", wanted) as bar:
        bar.advance(known, redone=False)
        for ref, state, outcome in _looked_at(book, loader, decode):
            book.say(ref, state, outcome)
            bar.advance(1)


def _looked_at(
    book: MediaBook, loader: MediaLoader, decode: bool
) -> Iterator[tuple[MediaRef, str, MediaFacts | SampleError]]:
    """Medium, state before the look, and what it said; as they come."""
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
            yield *waiting.pop(done), _outcome(done)


def _outcome(future: Future[MediaFacts]) -> MediaFacts | SampleError:
    try:
        return future.result()
    except SampleError as fault:
        return fault


def with_media(verdicts: Iterable[Verdict], book: MediaBook) -> Iterator[Verdict]:
    """The verdicts with what is known of their media; questions whose media cannot be used are refused."""
    for one in verdicts:
        yield one if one.sample is None else _with_facts(one, one.sample, book)


def _with_facts(one: Verdict, sample: Sample, book: MediaBook) -> Verdict:
    facts = []
    for ref in sample.media:
        said = book.said_of(ref)
        if isinstance(said, SampleError):
            bad = BadSample(sample.sample_id, said.reason, str(said), sample.where, said.trace)
            return replace(one, sample=None, refused=bad)
        if said is not None:
            facts.append(said)
    return replace(one, facts=tuple(facts))


# Where no settings are given: limits that a run may raise refuse nothing, what no run can read is the file's fault.
_LENIENT = {"max_video_seconds": 1e9, "max_header_pixels": 170_000_000, "deadline_seconds": 600.0}
# Of this process, not of the media.
_NOT_OF_MEDIA = {"workers"}


def media_settings(given: Sequence[str], workers: int) -> MediaSettings:
    """The settings, as ``--media KEY=VALUE ...`` gives them; all others then have a run's defaults.

    Raises:
        ConfigError: a key or value is none.
    """
    if not given:
        return MediaSettings(**_LENIENT, workers=workers)
    values: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        key = key.strip().removeprefix("media.")
        if not equals or key not in MediaSettings.model_fields or key in _NOT_OF_MEDIA:
            near = nearest_keys(key, MediaSettings)
            raise ConfigError(
                f"--media has '{printable(one, 200)}'. KEY=VALUE is expected, where KEY is one of a run's 'media' "
                f"settings but workers, for example max_frames=64.{f' Did you mean {near[0]}?' if near else ''}"
            )
        values[key] = _value(text)
    try:
        return MediaSettings(**values, workers=workers)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'media'} is {printable(str(one['input']), 100)}: {one['msg']}"
            for one in error.errors()
        )
        raise ConfigError(f"--media cannot be used: {said}. Correct it.") from None


def _value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def shown_settings(settings: MediaSettings, factor: int) -> str:
    """What of settings and patches decides about numbers of visual tokens, for people."""
    sampled = "evenly" if settings.num_frames else f"{settings.fps:g} a second"
    frames = f"frames {sampled}, at most {settings.most_frames} of up to {settings.max_pixels:,} pixels"
    budget = "" if settings.video_tokens is None else f", {settings.video_tokens:,} tokens of a video"
    return f"{frames}, images of up to {settings.image_max_pixels:,}{budget}, patches of {factor}"
