"""Flashing colours: a small video question-answering set, rendered here as real mp4 files.

    python -m data_pipelines.embedded --out data/embedded

A shape flashes four of five colours in random order; "Which colour is shown second?", options in random order. Some
orders of colours never occur in training. Writes ``train.jsonl``, ``eval_seen.jsonl`` (new clips of the orders trained
on), ``eval_unseen.jsonl`` (clips of the held-out orders) and ``clips/``. Equal arguments give equal records and pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipelines import flashes, run
from data_pipelines.engine import output_folder
from data_pipelines.flashes import POSITIONS, SEEN_ORDERS, UNSEEN_ORDERS, Clip, Order
from vlm_pg.data.prepared import MANIFEST
from vlm_pg.data.records import write_records
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing
from vlm_pg.progress import Bar
from vlm_pg.rewards.rewarder import gold_faults
from vlm_pg.types import MediaRef, Sample

SOURCE, PIPELINE = "flashes", "embedded"
# Part of a prepared folder's identity. 2: with ``process``.
RECORDS_VERSION = 2
_CLIPS = "[0-9][0-9][0-9][0-9][0-9].mp4"
_LISTED = 6


@dataclass(frozen=True)
class Split:
    """One file of records. ``key`` keeps the clips of the splits apart; ``orders`` are the colour orders it draws from.

    Split("eval_unseen", 2, UNSEEN_ORDERS, "unseen order")
    """

    name: str
    key: int
    orders: tuple[Order, ...]
    category: str

    @property
    def records(self) -> str:
        return f"{self.name}.jsonl"

    @property
    def clips(self) -> str:
        return f"clips/{self.name}"

    def clip(self, index: int) -> str:
        return f"{self.clips}/{index:05d}.mp4"


SPLITS = (
    Split("train", 0, SEEN_ORDERS, "seen order"),
    Split("eval_seen", 1, SEEN_ORDERS, "seen order"),
    Split("eval_unseen", 2, UNSEEN_ORDERS, "unseen order"),
)
_NAMES = [name for split in SPLITS for name in (split.records, split.clips)]
# Clips that something other than this set needs (to start the model off, say) have keys from here on.
FIRST_FREE_KEY = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    arguments = _parse(argv)
    out: Path = arguments.out
    identity = {
        "pipeline": PIPELINE,
        "render_version": flashes.RENDER_VERSION,
        "records_version": RECORDS_VERSION,
        **{name: getattr(arguments, name) for name in ("seed", "train", "eval")},
    }
    with output_folder.locked(out):
        if arguments.overwrite:
            _clear(out)
        if output_folder.find_prepared(out, identity) is not None:
            output_folder.settle(out)
            print(f"{out} is already prepared: {arguments.train} training and 2 x {arguments.eval} evaluation clips.")
            return 0
        output_folder.claim(out, _NAMES)
        files = {}
        for split in SPLITS:
            count = arguments.train if split.name == "train" else arguments.eval
            samples = _render_split(split, count, arguments.seed, out)
            write_records(out / split.records, samples)
            files[split.records] = len(samples)
        output_folder.write_manifest(out, identity, files)
        output_folder.settle(out)
    print(f"Wrote {', '.join(f'{name} ({count} clips)' for name, count in files.items())} to {out}.")
    return 0


def _render_split(split: Split, count: int, seed: int, out: Path) -> list[Sample]:
    """Write the clips of one split and return their records, whose gold answers are checked."""
    (out / split.clips).mkdir(parents=True, exist_ok=True)
    samples = []
    clips = flashes.make_clips(count, split.orders, flashes.POSITIONS, (seed, split.key))
    with Bar(f"Rendering {split.name} clips", count) as bar:
        for index, clip in enumerate(clips):
            write_clip(clip, out / split.clip(index))
            media = MediaRef("video", split.clip(index))
            samples.append(to_sample(clip, f"{split.name}-{index:05d}", media, split.category))
            bar.advance(1)
    for fault in gold_faults(samples):
        if fault is not None:
            raise fault
    return samples


def to_sample(clip: Clip, sample_id: str, media: MediaRef, category: str) -> Sample:
    """The question about a clip as a record."""
    return Sample(
        sample_id=sample_id,
        question=f"Which colour is shown {clip.position}?",
        media=(media,),
        options=tuple(f"{letter}. {colour}" for letter, colour in zip("ABCD", clip.options, strict=True)),
        answer=clip.answer,
        answer_kind="multiple_choice",
        source=SOURCE,
        category=category,
        process=thought(clip.order, clip.position),
    )


def thought(listed: Order, position: str) -> str:
    """The reasoning that leads to the answer: all colours, then the one asked for.

    Listing every colour is what makes the task learnable: each one is evidence about one moment of the video.
    """
    return f"<think> {' '.join(listed)}, {position} {listed[POSITIONS.index(position)]}</think>"


def write_clip(clip: Clip, path: Path) -> None:
    """Write one mp4 that appears whole or not at all."""
    with replacing(path, durable=False) as file:
        flashes.encode_mp4(flashes.draw(clip), Path(file.name))


def _clear(out: Path) -> None:
    """Remove the files of an earlier run of this pipeline, as its manifest lists them, and nothing else.

    Raises ConfigError: another pipeline prepared the folder, or other files have names of clips.
    """
    manifest = output_folder.own_manifest(out)
    if manifest is None:
        return
    if manifest["arguments"].get("pipeline") != PIPELINE or "render_version" not in manifest["arguments"]:
        raise ConfigError(
            f"'{printable(str(out), 300)}' was prepared by another pipeline, whose files are not replaced. A folder of "
            "its own, or one that this pipeline prepared, is expected. Choose another --out, or remove that set."
        )
    ours = {}
    for split in SPLITS:
        count = manifest["files"].get(split.records, 0)
        ours[split] = [split.clip(index) for index in range(count if isinstance(count, int) else 0)]
        others = {path.relative_to(out).as_posix() for path in (out / split.clips).glob(_CLIPS)}.difference(ours[split])
        if others:
            first = ", ".join(printable(name, 100) for name in sorted(others)[:_LISTED])
            raise ConfigError(
                f"--out '{printable(str(out), 300)}' holds {first}{' ...' if len(others) > _LISTED else ''}, which its "
                f"{MANIFEST} does not list: other files are not replaced. Clips of this program's alone are "
                "expected. Choose another --out, or move them away."
            )
    output_folder.adopt(out, [MANIFEST, *_NAMES])
    (out / MANIFEST).unlink()
    for split in SPLITS:
        for name in (*([split.records] if split.records in manifest["files"] else []), *ours[split]):
            if not (out / name).is_dir():
                (out / name).unlink(missing_ok=True)
        with suppress(OSError):  # missing, or not empty
            (out / split.clips).rmdir()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vlm-pg prepare embedded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it holds this one set")
    parser.add_argument("--seed", type=int, default=0, help="decides all clips and questions (default 0)")
    parser.add_argument("--train", type=int, default=2048, help="training clips (default 2048)")
    parser.add_argument("--eval", type=int, default=256, help="clips in each evaluation file (default 256)")
    parser.add_argument("--overwrite", action="store_true", help="replace a set prepared with other arguments")
    arguments = parser.parse_args(argv)
    for name, lowest in (("seed", 0), ("train", 1), ("eval", 1)):
        if not lowest <= getattr(arguments, name) <= 99_999:
            raise ConfigError(
                f"--{name} is {getattr(arguments, name)}. {lowest} to 99999 is allowed. Choose a number in that range."
            )
    return arguments


if __name__ == "__main__":
    raise SystemExit(run(main))
