"""Media looked at once each, several at a time, however many questions ask about them."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from vlm_pg.data.dedup import Ledger
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.paths import resolve
from vlm_pg.media.probe import MediaFacts
from vlm_pg.types import Cue, MediaRef

_PROBED = "probed"
Facts = MediaFacts | SampleError
_UnderWay = list[Future[MediaFacts] | Future[bool] | SampleError]


@dataclass(frozen=True)
class Place:
    """Where the media of a set lie, and who reads them there. ``how``: equal where facts of a medium are equal."""

    loader: MediaLoader
    root: Path
    allow_remote: bool
    how: str = ""


class Prober:
    """Facts of media, by file and part. What became of each is kept in a ledger.

    Args:
        ledger: remembers.
        decode: media are decoded wholly.
        keep: their frames go into the cache, too, which decodes them in any case.
    """

    def __init__(self, ledger: Ledger, decode: bool = False, keep: bool = False):
        self._ledger, self._decode, self._keep = ledger, decode, keep
        self._under_way: dict[str, _UnderWay] = {}

    def ask(self, ref: MediaRef, place: Place) -> str | SampleError:
        """Begin to look at a medium, unless somebody has. The key to ask ``facts`` with, or why there are none."""
        try:
            path = resolve(ref, place.root, place.allow_remote)
        except SampleError as fault:
            return fault
        subtitles = ref.subtitles and f"{place.root}/{ref.subtitles}"
        part = (ref.kind, path, ref.folder_fps, ref.start, ref.end, ref.times, subtitles, place.how)
        key = repr(part)
        if key not in self._under_way and self._ledger.look(_PROBED, key) is None:
            self._under_way[key] = self._begin(ref, place.loader)
        return key

    def facts(self, key: str | SampleError) -> Facts:
        """What became of what ``ask`` has begun; waits for it."""
        if isinstance(key, SampleError):
            return key
        started = self._under_way.pop(key, None)
        if started is not None:
            found = self._finish(started)
            self._ledger.add(_PROBED, key, _written(found))
            return found
        known = self._ledger.look(_PROBED, key)
        assert known is not None, "facts are asked for with a key that ask has given"
        return _read(known)

    def _begin(self, ref: MediaRef, loader: MediaLoader) -> _UnderWay:
        # Keeping decodes the whole medium already, or reads and checks what is kept.
        return [loader.keep(ref), loader.probe(ref)] if self._keep else [loader.probe(ref, self._decode)]

    @staticmethod
    def _finish(started: _UnderWay) -> Facts:
        found: MediaFacts | None = None
        for one in started:
            if isinstance(one, SampleError):
                return one
            try:
                result = one.result()
            except SampleError as fault:
                return fault
            found = found if isinstance(result, bool) else result
        assert found is not None
        return found


def _written(found: Facts) -> str:
    return json.dumps(asdict(found) if isinstance(found, MediaFacts) else [found.reason, str(found), found.trace])


def _read(text: str) -> Facts:
    said = json.loads(text)
    if isinstance(said, list):
        return SampleError(*said)
    cues = tuple(Cue(**cue) for cue in said["subtitles"])
    return MediaFacts(**said | {"frame_seconds": tuple(said["frame_seconds"]), "subtitles": cues})
