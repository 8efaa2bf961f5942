"""Prompts without a model: words, frames and settings of every question, for other programs to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_pg.config import RunConfig
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, ModelError, SampleError
from vlm_pg.eval.answer_files import file_name, refuse_equal_files
from vlm_pg.eval.protocols.protocol import MEDIA_KEYS, Protocol
from vlm_pg.eval.settings import NO_SETS
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
from vlm_pg.prompts.chat import Medium, Turn
from vlm_pg.types import MediaRef, Sample

# Samples whose media are probed at the same time.
_PROBE_BATCH = 64


@dataclass(frozen=True)
class WrittenPrompts:
    """The prompts of one set.

    ``asked``: lines, ``faults`` of them without words. ``not_asked``: questions that its protocol excludes, and
    ``unreadable``: unusable records; both have no line.
    """

    path: Path
    asked: int
    not_asked: int
    faults: int
    unreadable: int


def write_prompts(config: RunConfig, folder: Path) -> dict[str, WrittenPrompts]:
    """Write ``prompts_<set>.jsonl`` for every chosen evaluation set, a line per question, in order.

    A line has ``id``, ``system`` ("" for none), ``user``, ``answer_prefix``, ``media``, ``settings``. ``user`` is a
    list where not all media come before its words: texts, ``{"medium": index in media}``, and, where single frames of a
    video stand between words, indices of frames in ``frame_seconds``. Of each medium: ``kind``, ``path`` as the record
    has it, the resolved ``file``, ``start`` and ``end`` of a clip, ``folder_fps`` of a folder of pictures,
    ``frame_seconds`` (times of the frames that are shown), ``height`` and ``width`` of each, ``sampled_fps``. A
    question whose media cannot be used has ``fault`` (reason and message) instead of words.

    Media are read through, one frame of each is decoded. No weights, processor or tokenizer are loaded; the model's
    config only where there are media, since sizes are multiples of its patches.

    Args:
        config: its ``data.eval``, ``eval`` and ``eval.protocols``; a set without a protocol goes by ``prompt``,
            ``media``, ``rollout`` and ``eval``.
        folder: created if missing.

    Returns:
        By name of the set.

    Raises:
        ConfigError: there are no evaluation sets, their records cannot be read, or two would have one file.
        ModelError: there are media and the model's config cannot be read, or it is a model of text.
    """
    names = config.eval.chosen_sets(list(config.data.eval))
    if not names:
        raise ConfigError(NO_SETS)
    refuse_equal_files(names, "prompts")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    with ExitStack() as stack:
        pool, factor = None, None
        for name in names:
            samples, unreadable = read_records(config.data.eval[name])
            reported = config.eval.reported_questions(name, samples)
            chosen = reported[: config.eval.limit]
            if factor is None and any(sample.media for sample in chosen):
                factor = _token_side(config.model)
                pool = decoding_pool(config.media)
                if pool is not None:
                    stack.enter_context(pool)
            prompts = _SetPrompts(config, name, factor, pool)
            path = folder / f"prompts_{file_name(name)}.jsonl"
            faults = 0
            with replacing(path, durable=False) as file:
                for row in prompts.rows(chosen):
                    faults += "fault" in row
                    file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode(errors="backslashreplace"))
            excluded = len(samples) - len(reported)
            written[name] = WrittenPrompts(path, len(chosen), excluded, faults, len(unreadable))
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


class _SetPrompts:
    """The prompts of one set; ``factor``: pixels of a visual token's side, None where no question has media."""

    def __init__(self, config: RunConfig, name: str, factor: int | None, pool: WorkerPool | None):
        protocol, data = config.eval.protocol_of(name), config.data
        self._root, self._allow_remote = data.root_for(data.eval[name], name), data.allow_remote
        self._answer_prefix = "" if protocol is None else protocol.answer_prefix
        media, prompt = config.media, config.prompt
        self._wording: Wording = settings_wording(prompt)
        if protocol is not None:
            media, prompt = protocol.media_settings(media), protocol.prompt_settings(prompt)
            self._wording = wording_of(protocol)
        self._settings = _sampling_and_media(config, protocol, media)
        self._loader: MediaLoader | None = None
        if factor is not None:
            self._loader = MediaLoader(media, self._root, data.allow_remote, factor, pool, prompt.subtitles)

    def rows(self, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        """A line per question, as in ``write_prompts``."""
        for first in range(0, len(samples), _PROBE_BATCH):
            batch = samples[first : first + _PROBE_BATCH]
            # Questions on one video follow each other; it is probed once for them.
            loader, refs = self._loader, dict.fromkeys(ref for sample in batch for ref in sample.media)
            probes = {} if loader is None else {ref: loader.probe(ref) for ref in refs}
            for sample in batch:
                row: dict[str, Any] = {"id": sample.sample_id}
                try:
                    facts = []
                    for ref in sample.media:
                        probe = probes[ref]
                        if isinstance(probe, SampleError):
                            raise probe
                        facts.append(probe.result())
                    media = list(zip(sample.media, facts, strict=True))
                    row["system"], user = self._wording(sample, [stand_in(ref.kind, one) for ref, one in media])
                    row["user"] = user
                    if isinstance(user, Turn):
                        row["user"] = [{"medium": p.index} if isinstance(p, Medium) else p for p in user.parts]
                    row["answer_prefix"] = self._answer_prefix
                    row["media"] = [self._medium(ref, one) for ref, one in media]
                except SampleError as error:
                    row = {"id": sample.sample_id, "fault": {"reason": error.reason, "message": str(error)}}
                yield {**row, "settings": self._settings}

    def _medium(self, ref: MediaRef, facts: MediaFacts) -> dict[str, Any]:
        return {
            "kind": ref.kind,
            "path": ref.path,
            "file": resolve(ref, self._root, self._allow_remote),
            "start": ref.start,
            "end": ref.end,
            **({} if ref.folder_fps is None else {"folder_fps": ref.folder_fps}),
            "frame_seconds": [round(second, 6) for second in facts.frame_seconds],
            "height": facts.height,
            "width": facts.width,
            "sampled_fps": round(facts.sampled_fps, 6),
        }


def _sampling_and_media(config: RunConfig, protocol: Protocol | None, media: MediaSettings) -> Mapping[str, Any]:
    """How frames were selected and how answers are to be sampled and read."""
    seen = {key: getattr(media, key) for key in MEDIA_KEYS}
    if protocol is None:
        sampling = {key: getattr(config.eval, key) for key in ("temperature", "top_p", "num_generations")}
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
