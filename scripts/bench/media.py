"""Costs of the media of a run's records, decoded every time and with their frames kept.

    python -m scripts.bench.media CONFIG [KEY=VALUE ...] [--repeats N] [--limit N] [--out FILE.json]

Every medium of data.train, as far as data.limit goes, is asked for once in each of these ways, which take turns, in one
process on one thread:

  bare     its frames decoded and resized, and nothing else: where they lie in the file is known
  decoded  what training asks for without a cache: judged, its frames found, chosen, decoded, resized
  first    the same, and its frames put into an empty cache
  new      its frames taken from there by a process that has not seen the file, whose content it reads for the key
  kept     its frames taken from there by a process that has seen the file: every later epoch

Frames of all ways but the first are compared, and are equal. The cache lies in a temporary folder, which is removed.
Seconds are those of the processor, and of the clock; files lie in the system's memory after the first run, so a disk's
own time is in neither.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench import run
from vlm_pg.bench.runner import describe_machine
from vlm_pg.config import RunConfig, load_config
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.files import write_json_atomic
from vlm_pg.media.container import header_of, open_video
from vlm_pg.media.decode_file import resize_frames
from vlm_pg.media.frame_folder import FolderDecoder, list_frames
from vlm_pg.media.index import index_of
from vlm_pg.media.sampling import WHOLE, Part, Timeline
from vlm_pg.media.seeking import PyAVDecoder
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef

WAYS = ("bare", "decoded", "first", "new", "kept")
Seconds = dict[str, list[float]]


def main(argv: Sequence[str]) -> int:
    """Run from the command line.

    Raises:
        ConfigError: no records, no media that can be used, a file that is there already.
    """
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, arguments.overrides)
    if not config.data.train_sets:
        raise ConfigError("data.train is not set. Records whose media are measured are needed. Set it.")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats is {arguments.repeats}; at least 1 timed run is needed.")
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists. Measurements are not thrown away. Give another file to --out.")
    import torch

    from vlm_pg.models.loading import load_config as load_model_config
    from vlm_pg.models.registry import family_of

    torch.set_num_threads(1)
    model = load_model_config(config.model.path, config.model)
    measured, left_out = _measure_all(config, family_of(model).pixels(model).token_side, arguments)
    if not measured:
        raise ConfigError(
            f"None of the {len(left_out)} media of {config.data.train_shown} can be used: {left_out[:1]}."
        )
    epoch = _epoch(measured)
    print("\n".join(_lines(epoch, len(measured), left_out)))
    if arguments.out is not None:
        command = shlex.join(["python", "-m", "scripts.bench.media", *argv])
        whole = {"measurement": "media", "commands": [command], "machine": describe_machine(), "epoch": epoch}
        settings = config.media.model_dump(mode="json")
        write_json_atomic(arguments.out, {**whole, "settings": settings, "media": measured, "left_out": left_out})
        print(f"raw numbers: {arguments.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.media", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that override the file's")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each way, after one warm-up")
    parser.add_argument("--limit", type=int, help="only so many media, the first ones")
    parser.add_argument("--out", type=Path, help="file for the raw numbers, JSON")
    return parser


def _measure_all(
    config: RunConfig, factor: int, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """What each medium costs in each way, and what was left out and why."""
    data = config.data
    sets = data.train_sets.items()
    opened = [(data.root_for(path, name), open_records(path)[0][: data.limit]) for name, path in sets]
    named = dict.fromkeys((root, ref) for root, samples in opened for one in samples for ref in one.media)
    refs = list(named)[: arguments.limit]
    measured, left_out = [], []
    with tempfile.TemporaryDirectory(prefix="vlm_pg_bench_") as folder:
        for place, (root, ref) in enumerate(refs):
            try:
                found = _measure(config, factor, root, ref, Path(folder, str(place)), arguments.repeats)
            except SampleError as fault:
                left_out.append(f"{printable(ref.path, 200)}: {fault.reason}")
                continue
            measured.append(found)
            times = ", ".join(f"{way} {1e3 * statistics.median(found['cpu_seconds'][way]):.1f}" for way in WAYS)
            print(f"[{place + 1}/{len(refs)}] {printable(ref.path, 80)}: {found['frames']} frames, ms: {times}")
    return measured, left_out


def _measure(config: RunConfig, factor: int, root: Path, ref: MediaRef, folder: Path, repeats: int) -> dict[str, Any]:
    """One medium below ``root``. Raises SampleError if it cannot be used."""
    from vlm_pg.cache.settings import CacheSettings
    from vlm_pg.media.frame_cache import content_of, load_file
    from vlm_pg.media.paths import SubtitlesRef, resolve

    path = resolve(ref, root)
    subtitles = resolve(SubtitlesRef(ref.subtitles), root) if ref.subtitles and config.prompt.subtitles else ""

    def load(kept: CacheSettings | None = None) -> DecodedMedia:
        return load_file(ref.kind, path, config.media, factor, Part.of(ref), subtitles, kept)

    def load_new(kept: CacheSettings) -> DecodedMedia:
        content_of.cache_clear()
        return load(kept)

    expected = load()
    bare = bare_decoding(ref.kind, path, config.media, expected, Part.of(ref))
    cpu: Seconds = {way: [] for way in WAYS}
    wall: Seconds = {way: [] for way in WAYS}
    for repeat in range(-1, repeats):
        kept = CacheSettings(folder=folder / str(repeat + 1))
        ways: Mapping[str, Callable[[], DecodedMedia | None]] = {
            "bare": bare,
            "decoded": load,
            "first": lambda kept=kept: load_new(kept),  # type: ignore[misc]
            "new": lambda kept=kept: load_new(kept),  # type: ignore[misc]
            "kept": lambda kept=kept: load(kept),  # type: ignore[misc]
        }
        for way, load_frames in ways.items():
            clock, core = time.perf_counter(), time.process_time()
            media = load_frames()
            core_seconds, clock_seconds = time.process_time() - core, time.perf_counter() - clock
            if media is not None and not np.array_equal(media.frames, expected.frames):
                raise RuntimeError(f"the frames of {ref.path} by '{way}' are not those that decoding gives")
            if repeat >= 0:
                cpu[way].append(core_seconds)
                wall[way].append(clock_seconds)
    entries = list((folder / "1").rglob("*.safetensors"))
    return {
        **{name: value for name, value in asdict(ref).items() if value},
        "frames": len(expected.frames),
        "height_width": list(expected.frames.shape[2:]),
        "file_bytes": _bytes_of(Path(path)),
        "entry_bytes": sum(entry.stat().st_size for entry in entries),
        "cpu_seconds": cpu,
        "seconds": wall,
    }


def _bytes_of(path: Path) -> int:
    """Of a file, or of the files in a folder of pictures."""
    return sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))


def _epoch(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All media once, by the median of each: seconds, frames a second, and times as fast as ``decoded``."""
    found: dict[str, Any] = {"media": len(measured), "frames": sum(one["frames"] for one in measured)}
    for unit in ("cpu_seconds", "seconds"):
        sums = {way: sum(statistics.median(one[unit][way]) for one in measured) for way in WAYS}
        found[unit] = sums
        found[f"gain_{unit}"] = {way: sums["decoded"] / sums[way] for way in WAYS}
    found["bytes"] = {name: sum(one[f"{name}_bytes"] for one in measured) for name in ("file", "entry")}
    return found


def _lines(epoch: Mapping[str, Any], count: int, left_out: Sequence[str]) -> list[str]:
    lines = [f"an epoch of {count} media, {epoch['frames']} frames"]
    for way in WAYS:
        cpu, gain = epoch["cpu_seconds"][way], epoch["gain_cpu_seconds"][way]
        lines.append(
            f"  {way:8} {cpu:9.3f} s of a core ({epoch['seconds'][way]:.3f} s), {epoch['frames'] / cpu:8.0f} frames/s, "
            f"{gain:6.2f} times as fast as decoded"
        )
    sizes = epoch["bytes"]
    lines.append(f"  files {sizes['file'] / 2**20:.1f} MiB, kept frames {sizes['entry'] / 2**20:.1f} MiB")
    return lines + [f"left out: {line}" for line in left_out]


def bare_decoding(
    kind: MediaKind, path: str, settings: MediaSettings, media: DecodedMedia, part: Part = WHOLE
) -> Callable[[], None]:
    """What decodes and resizes the frames of ``media`` once more, by PyAV or Pillow, without any other look at it."""
    height, width = media.frames.shape[2:]
    if kind == "image":
        return lambda: _image(path, height, width)
    if part.folder_fps is not None:
        return _folder(path, settings, media, part.folder_fps)
    with open_video(Path(path)) as (container, stream):
        header, index = header_of(container, stream), index_of(container, stream, settings.max_video_frames)
    seconds = np.asarray(Timeline.of(index.pts_seconds, index.time_base, header.stated_fps).seconds)
    places = sorted({int(np.abs(seconds - second).argmin()) for second in media.frame_seconds})

    def video() -> None:
        decoder = PyAVDecoder(Path(path), index, settings.max_video_frame_pixels)
        resize_frames(decoder.read(places), height, width)

    return video


def _folder(path: str, settings: MediaSettings, media: DecodedMedia, fps: float) -> Callable[[], None]:
    folder = list_frames(Path(path), Path(path).name, fps, settings.max_video_frames)
    places = sorted({round(second * fps) for second in media.frame_seconds})
    height, width = media.frames.shape[2:]

    def pictures() -> None:
        resize_frames(FolderDecoder(folder, settings).read(places), height, width)

    return pictures


def _image(path: str, height: int, width: int) -> None:
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)


if __name__ == "__main__":
    run(main)
