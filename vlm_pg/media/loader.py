"""Loading media: references in, one decoded medium or SampleError for each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_pg.cache.settings import CacheSettings
from vlm_pg.cache.store import BEGAN, open_folder
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.paths import SubtitlesRef, resolve, shown_url
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaRef

if TYPE_CHECKING:
    from vlm_pg.media.decode_file import MediaFacts

POLL_SECONDS = 0.2
_DECODE_MODULE = "vlm_pg.media.decode_file"
_CACHE_MODULES = ("vlm_pg.media.frame_cache", "av", "PIL.features", "pyarrow", "xxhash", "safetensors.numpy")


class Ticket:
    """Decoding under way. ``result`` may be called any number of times."""

    def __init__(self, futures: Sequence[Future[DecodedMedia] | SampleError]):
        self._futures = futures

    def result(self, should_stop: Callable[[], bool] = lambda: False) -> list[DecodedMedia | SampleError]:
        """The medium or the fault of each reference, in order.

        Raises:
            InterruptedError: ``should_stop``, polled, returned True. Decoding goes on; ``result`` may be called again.
            RuntimeError: a bug of the program surfaced in a worker.
        """
        pending = {item for item in self._futures if isinstance(item, Future)}
        while pending:
            if should_stop():
                raise InterruptedError(f"stopped while waiting for {len(pending)} media file(s) to be decoded")
            pending = wait(pending, timeout=POLL_SECONDS).not_done
        found: list[DecodedMedia | SampleError] = []
        for item in self._futures:
            try:
                found.append(item if isinstance(item, SampleError) else item.result())
            except SampleError as error:
                found.append(error)
        return found


def import_decoding() -> None:
    """Import torch and torchvision: when there is something to decode, not before, and not in the pool's thread."""
    import_module(_DECODE_MODULE)
    import_module("qwen_vl_utils.vision_process")


def decoding_pool(settings: MediaSettings, cache_settings: CacheSettings | None = None) -> WorkerPool | None:
    """The worker processes of the settings, which start with the first file; None for ``workers=0``.

    ``cache_settings``: of their loaders' cache, if any: its modules are then imported before workers are forked.
    """
    if not settings.workers:
        return None
    has_cache = cache_settings is not None and cache_settings.folder is not None and cache_settings.frames
    modules = (_DECODE_MODULE, *(_CACHE_MODULES if has_cache else ()))
    memory, gpu = settings.worker_memory_bytes, settings.decoder_device == "cuda"
    return WorkerPool(settings.workers, settings.deadline_seconds, modules, memory, gpu)


class MediaLoader(AbstractContextManager["MediaLoader"]):
    """Decodes media files of one data root, in worker processes or (``workers=0``, for debugging) in this one.

    Args:
        root: the data root; only files below it are read.
        allow_remote: whether http and https URLs are downloaded.
        factor: patch size times merge size of the vision tower; sides of frames become its multiples.
        pool: of ``decoding_pool``, for several loaders, whose owner closes it; by default this one has its own.
        subtitles: whether those that a record names are read too.
        cache_settings: of the frame cache; None: every file is decoded every time.

    Raises:
        ConfigError: the cache's folder cannot be used, the data root is not a folder, or the configured decoder does
            not run here.
    """

    def __init__(
        self,
        settings: MediaSettings,
        root: Path,
        allow_remote: bool = False,
        factor: int = 28,
        pool: WorkerPool | None = None,
        subtitles: bool = True,
        cache_settings: CacheSettings | None = None,
    ):
        if cache_settings is not None and cache_settings.folder is not None:
            open_folder(cache_settings.folder)
        self._cache_settings = cache_settings
        if not root.is_dir():
            raise ConfigError(
                f"data.media_root is '{root}', which is not a folder. The folder that the media paths of the records "
                "start from is expected. Correct data.media_root, or data.media_root.NAME of one set."
            )
        if settings.decoder == "decord" and find_spec("decord") is None:
            raise ConfigError(
                "media.decoder is decord, which is not installed. auto, decord, pyav and torchcodec are allowed. "
                "Install decord, or set media.decoder=auto."
            )
        if settings.decoder == "torchcodec":
            import_module("vlm_pg.media.video_decoders").check_installed(settings.decoder_device)
        self._reads_subtitles = subtitles
        self._settings, self._root, self._allow_remote, self._factor = settings, root, allow_remote, factor
        self._owns_pool = pool is None
        self._pool = decoding_pool(settings, cache_settings) if pool is None else pool

    def submit(self, refs: Sequence[MediaRef]) -> Ticket:
        """Start decoding in the background (with ``workers=0``: decode now)."""
        last = "vlm_pg.media.frame_cache", "load_file", self._cache_settings, BEGAN
        return Ticket([self._submitted(ref, *last) for ref in refs])

    def load(self, refs: Sequence[MediaRef]) -> list[DecodedMedia | SampleError]:
        """Decode and wait."""
        return self.submit(refs).result()

    def store(self, ref: MediaRef) -> Future[bool] | SampleError:
        """Put the frames of a medium into the cache, without returning them (with ``workers=0``: now).

        True once they are there; media of URLs are not stored, nor what has no room.
        """
        return self._submitted(ref, "vlm_pg.media.frame_cache", "store_file", self._cache_settings, BEGAN)

    def probe(self, ref: MediaRef, decode: bool = False) -> Future[MediaFacts] | SampleError:
        """What a medium is, by ``probe_file`` (with ``workers=0``: now)."""
        return self._submitted(ref, "vlm_pg.media.decode_file", "probe_file", decode)

    @property
    def workers(self) -> int:
        """How many files are decoded at a time."""
        return max(1, self._settings.workers)

    def _submitted(self, ref: MediaRef, module: str, function: str, *last: Any) -> Future[Any] | SampleError:
        """A function called with the file that a reference names, how it is to be read, and ``last``."""
        try:
            path = resolve(ref, self._root, self._allow_remote)
            subtitles = ""
            if ref.subtitles and self._reads_subtitles:
                subtitles = resolve(SubtitlesRef(ref.subtitles), self._root, self._allow_remote)
        except SampleError as error:
            return error
        import_decoding()
        from vlm_pg.media.sampling import Part

        call = getattr(import_module(module), function)
        args = (ref.kind, path, self._settings, self._factor, Part.of(ref), subtitles, *last)
        if self._pool is not None:
            name = shown_url(path) if "://" in path else ref.path
            return self._pool.submit(call, *args, label=f"{ref.kind} '{name}'")
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args))
        except SampleError as error:
            return error
        return future

    def close(self) -> None:
        """End the workers, if this loader owns them; pending files fail."""
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    def __exit__(self, *error: object) -> None:
        self.close()
