"""How a pipeline looks at media: which settings, which processes, and what is then known of a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.media_book import MediaBook
from data_pipelines.engine.media_settings import media_settings, shown_settings
from data_pipelines.engine.probing import probe_all, with_media
from data_pipelines.engine.spool import Spool
from data_pipelines.manifest import fingerprint
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings


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
