"""One prompt source per file of records, one pool of decoding processes behind them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from vlm_pg.cache.settings import CacheSettings
from vlm_pg.data.settings import DataSettings
from vlm_pg.media.loader import MediaLoader, decoding_pool, import_decoding
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.prompt_source import PromptSource
from vlm_pg.types import Prompt


@dataclass(frozen=True)
class Asking:
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
        pool: of ``decoding_pool(media, kept)``, if already started; closed with this.
        kept: the cache of frames, if any.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        data: DataSettings,
        media: MediaSettings,
        factor: int,
        check: Callable[[Prompt], None] = lambda prompt: None,
        pool: WorkerPool | None = None,
        kept: CacheSettings | None = None,
    ):
        self._kept = kept
        self._data, self._factor = data, factor
        self._asking = Asking(media, builder, check)
        self._pool = decoding_pool(media, kept) if pool is None else pool
        self._loaders: dict[tuple[Path, str, bool], MediaLoader] = {}

    def for_training(self, cache_bytes: int = 0) -> PromptSource:
        """The source of the samples of ``data.train``."""
        asking = self._asking
        loaders = {name: self._loader(path, name, asking) for name, path in self._data.train_sets.items()}
        return PromptSource(loaders, asking.builder, self._data.train_shown, asking.check, cache_bytes)

    def for_records(
        self, records: Path, name: str = "", cache_bytes: int = 0, asking: Asking | None = None
    ) -> PromptSource:
        """The source of the samples in ``records``; ``name``: of the set; ``asking``: how, by default as all others."""
        asking = asking or self._asking
        loaders = {"": self._loader(records, name, asking)}
        return PromptSource(loaders, asking.builder, str(records), asking.check, cache_bytes)

    def _loader(self, records: Path, name: str, asking: Asking) -> MediaLoader:
        root = self._data.root_for(records, name)
        key = (root, asking.media.model_dump_json(), asking.builder.reads_subtitles)
        if key not in self._loaders:
            self._loaders[key] = MediaLoader(
                asking.media,
                root,
                self._data.allow_remote,
                self._factor,
                self._pool,
                asking.builder.reads_subtitles,
                self._kept,
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
