"""What would be asked, without a model: words, frames and settings of every question, for other programs to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, ModelError, SampleError
from vlm_pg.eval.answer_files import file_name, refuse_equal_files
from vlm_pg.eval.protocols.protocol import MEDIA_KEYS, Protocol
from vlm_pg.eval.wording import wording_of
from vlm_pg.files import replacing
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.paths import resolve
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.loading import load_config
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import Wording, settings_wording, stand_in
from vlm_pg.prompts.turn import Medium, Turn
from vlm_pg.types import MediaRef, Sample

# Media that are looked at together; so many futures are held at a time.
_AT_A_TIME = 64


@dataclass(frozen=True)
class WrittenPrompts:
    """What was written of one set.

    ``asked``: lines, ``faults`` of them without words. ``not_asked``: questions that its protocol does not report, and
    ``unreadable``: records that are none; both have no line.
    """

    path: Path
    asked: int
    not_asked: int
    faults: int
    unreadable: int


@dataclass(frozen=True)
class _Asking:
    """How the questions of one set are asked."""

    wording: Wording
    loader: MediaLoader | None
    root: Path
    allow_remote: bool
    settings: Mapping[str, Any]


def write_prompts(config: RunConfig, folder: Path) -> dict[str, WrittenPrompts]:
    """Write ``prompts_<set>.jsonl`` for every evaluation set that is chosen, a line a question, in order.

    A line has ``id``, ``system`` ("" for none), ``user``, ``answer_prefix``, ``media``, ``settings``. ``user`` is a
    list where not all media come before its words: texts, ``{"medium": place in media}``, and, where single frames of a
    video stand between words, places of frames in ``frame_seconds``. Of each medium:
    ``kind``, ``path`` as the record has it, the ``file`` that is, ``start`` and ``end`` of a clip, ``folder_fps`` where
    it is a folder of pictures, ``frame_seconds``
    (when the frames that are shown stand), ``height`` and ``width`` of each, ``sampled_fps``. A question whose media
    cannot be used has ``fault`` (reason and message) in place of words.

    Media are read through, one frame of each is decoded. No weights, no processor and no tokenizer are loaded, and the
    model's config alone where there are media, since sizes are multiples of its patches.

    Args:
        config: its ``data.eval``, ``eval`` and ``eval.protocols``; a set without a protocol goes by ``prompt``,
            ``media``, ``rollout`` and ``eval``.
        folder: is made where it is not there.

    Returns:
        What was written, by name of the set.

    Raises:
        ConfigError: there are no evaluation sets, their records cannot be read, or two would have one file.
        ModelError: there are media and the model's config cannot be read, or it is one that reads text alone.
    """
    names = config.eval.chosen_sets(list(config.data.eval))
    if not names:
        raise ConfigError(
            "The configuration names no evaluation sets. Add them as data.eval.NAME=PATH, files of prepared records."
        )
    refuse_equal_files(names, "prompts")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with ExitStack() as stack:
        pool, factor = None, None
        for name in names:
            samples, unreadable = read_records(config.data.eval[name])
            asked = config.eval.asked(name, samples)
            chosen = asked[: config.eval.limit]
            if factor is None and any(sample.media for sample in chosen):
                factor = _token_side(config.model)
                pool = decoding_pool(config.media)
                if pool is not None:
                    stack.enter_context(pool)
            asking = _asking(config, name, factor, pool)
            path = folder / f"prompts_{file_name(name)}.jsonl"
            faults = _write_set(chosen, config.eval.protocol_of(name), asking, path)
            not_asked = len(samples) - len(asked)
            written[name] = WrittenPrompts(path, len(chosen), not_asked, faults, len(unreadable))
    return written


def _token_side(model: ModelSettings) -> int:
    """Pixels per side of one visual token."""
    config = load_config(model.path, model)
    family = family_of(config)
    if not family.reads_media:
        raise ModelError(
            f"The evaluation sets have images or videos, but the model {model.path} reads text alone. Use a Qwen-VL "
            "checkpoint, or records without media."
        )
    return family.pixels(config).token_side


def _asking(config: RunConfig, name: str, factor: int | None, pool: WorkerPool | None) -> _Asking:
    protocol, data = config.eval.protocol_of(name), config.data
    root = data.root_for(data.eval[name], name)
    if protocol is None:
        media, prompt, wording = config.media, config.prompt, settings_wording(config.prompt)
    else:
        media, prompt = protocol.media_settings(config.media), protocol.prompt_settings(config.prompt)
        wording = wording_of(protocol)
    loader = None
    if factor is not None:
        loader = MediaLoader(media, root, data.allow_remote, factor, pool, prompt.subtitles)
    return _Asking(wording, loader, root, data.allow_remote, _settings(config, protocol, media))


def _settings(config: RunConfig, protocol: Protocol | None, media: MediaSettings) -> dict[str, Any]:
    """How the frames were chosen and how answers are to be sampled and read."""
    seen = {key: getattr(media, key) for key in MEDIA_KEYS}
    if protocol is None:
        keys = ("temperature", "top_p", "num_generations")
        sampling = {key: getattr(config.eval, key) for key in keys}
        return {"protocol": None, "max_new_tokens": config.rollout.max_new_tokens, "sampling": sampling, "media": seen}
    return {
        "protocol": protocol.name,
        "max_new_tokens": protocol.max_new_tokens,
        "sampling": protocol.sampling.model_dump(mode="json"),
        "media": seen,
        "read_prefix": protocol.read_prefix,
        "reader": protocol.reader,
        "aggregation": protocol.aggregation,
    }


def _write_set(asked: Sequence[Sample], protocol: Protocol | None, asking: _Asking, path: Path) -> int:
    """How many of the questions have a fault."""
    prefix = "" if protocol is None else protocol.answer_prefix
    faults = 0
    with replacing(path, durable=False) as file:
        for row in _rows(asked, asking, prefix):
            faults += "fault" in row
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode(errors="backslashreplace"))
    return faults


def _rows(samples: Sequence[Sample], asking: _Asking, answer_prefix: str) -> Iterator[dict[str, Any]]:
    for first in range(0, len(samples), _AT_A_TIME):
        batch = samples[first : first + _AT_A_TIME]
        # Questions on one video stand together, and it is looked at once for them.
        probes = {
            ref: asking.loader.probe(ref) for sample in batch for ref in sample.media if asking.loader is not None
        }
        for sample in batch:
            row: dict[str, Any] = {"id": sample.sample_id}
            try:
                facts = [_found(probes[ref]) for ref in sample.media]
                shown = [stand_in(ref.kind, one) for ref, one in zip(sample.media, facts, strict=True)]
                row["system"], asked = asking.wording(sample, shown)
                row["user"] = [_part(part) for part in asked.parts] if isinstance(asked, Turn) else asked
                row["answer_prefix"] = answer_prefix
                row["media"] = [_medium(ref, one, asking) for ref, one in zip(sample.media, facts, strict=True)]
            except SampleError as error:
                row = {"id": sample.sample_id, "fault": {"reason": error.reason, "message": str(error)}}
            yield {**row, "settings": asking.settings}


def _part(part: str | int | Medium) -> Any:
    return {"medium": part.index} if isinstance(part, Medium) else part


def _found(probe: Future[MediaFacts] | SampleError) -> MediaFacts:
    if isinstance(probe, SampleError):
        raise probe
    return probe.result()


def _medium(ref: MediaRef, facts: MediaFacts, asking: _Asking) -> dict[str, Any]:
    return {
        "kind": ref.kind,
        "path": ref.path,
        "file": resolve(ref, asking.root, asking.allow_remote),
        "start": ref.start,
        "end": ref.end,
        **({} if ref.folder_fps is None else {"folder_fps": ref.folder_fps}),
        "frame_seconds": [round(second, 6) for second in facts.frame_seconds],
        "height": facts.height,
        "width": facts.width,
        "sampled_fps": round(facts.sampled_fps, 6),
    }
