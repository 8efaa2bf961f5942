"""The media of judged questions looked at: each once, several at a time, by processes that may hang or crash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.media_book import MediaBook
from data_pipelines.engine.progress import Bar
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.types import BadSample, MediaRef, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts

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
