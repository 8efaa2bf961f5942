"""Video-R1: its annotation file (Video-R1-260k.json and others of that layout) to checked train and eval records.

    python -m data_pipelines.video_r1 --annotations Video-R1-260k.json --media-root Video-R1-data --out data/video_r1

Every record is checked: its fields, that its media lie below the media root, that its gold answer earns the full
reward. Refused records go to ``refused.jsonl`` with their reason; ``report.json`` counts everything that was kept, left
out by a filter, or refused. Media are not copied: set ``data.media_root`` to the media root in the training config.
Evaluation records are chosen by their media, so that no image or video is in both files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_pipelines.common import MANIFEST, is_prepared, locked, run, state_of, write_manifest
from data_pipelines.media_store import MediaStore
from data_pipelines.outcome import Outcome, data_type
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.types import ANSWER_KINDS, Sample

DATA_TYPES = ("image", "video", "mixed", "text")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the set, or do nothing if it is there already. Returns the exit code."""
    arguments = _parse(argv)
    identity = _identity(arguments)
    out: Path = arguments.out
    with locked(out):
        if arguments.overwrite and (out / MANIFEST).exists():
            (out / MANIFEST).unlink()
        if is_prepared(out, identity):
            print(f"{out} is already prepared.")
            return 0
        samples, unreadable = read_records(arguments.annotations, MediaStore(arguments.media_root).unpack)
        outcome = sort_samples(samples, arguments)
        outcome.refused[:0] = unreadable
        if not outcome.train:
            raise ConfigError(_nothing_left(len(samples) + len(unreadable), outcome, arguments.annotations))
        inputs = {"annotations": str(arguments.annotations), "media_root": str(arguments.media_root)}
        files = outcome.write(out, ("train", "eval"), inputs)
        write_manifest(out, identity, files)
    print(outcome.summary())
    print(f"Wrote {', '.join(files)} to {out}. Train with data.media_root={arguments.media_root.resolve()}.")
    return 0


def sort_samples(samples: Sequence[Sample], arguments: argparse.Namespace) -> Outcome:
    """Put each sample where it belongs. Filters come first: what nobody asked for need not be right."""
    outcome = Outcome()
    wanted = []
    for sample in samples:
        if filtered_by := _filtered_by(sample, arguments):
            outcome.left_out[filtered_by] += 1
        else:
            wanted.append(sample)
    media_root = None if arguments.skip_media_check else arguments.media_root
    usable = outcome.usable(wanted, arguments.annotations.name, media_root)
    outcome.split(usable, arguments.eval_share, arguments.seed)
    return outcome


def _filtered_by(sample: Sample, arguments: argparse.Namespace) -> str | None:
    """The name of the filter that leaves a sample out; None if all let it pass."""
    if data_type(sample) not in arguments.data_types:
        return f"data type {data_type(sample)}"
    if sample.answer_kind not in arguments.answer_kinds:
        return f"answer kind {sample.answer_kind}"
    if arguments.sources and sample.source not in arguments.sources:
        return f"source {sample.source}"
    return None


def _nothing_left(total: int, outcome: Outcome, annotations: Path) -> str:
    return (
        f"None of the {total} records of '{annotations}' is left for training. At least one is needed.\n"
        f"{outcome.summary()}\nCorrect --media-root, or widen the filters."
    )


def _identity(arguments: argparse.Namespace) -> dict[str, object]:
    """What the result depends on, as JSON values; the annotation file by its size and time of change."""
    state = state_of(arguments.annotations, "--annotations", "Annotation file")
    if not arguments.media_root.is_dir():
        raise ConfigError(
            f"Media root '{arguments.media_root}' is not a folder. The folder that the paths in the annotation file "
            "start from is expected. Correct --media-root."
        )
    annotations: dict[str, object] = {"annotations": state["path"]}
    if "files" in state:
        annotations["annotations_files"] = state["files"]
    else:
        annotations |= {"annotations_bytes": state["bytes"], "annotations_changed_ns": state["changed_ns"]}
    return {
        "pipeline": "video_r1",
        **annotations,
        "media_root": str(arguments.media_root.resolve()),
        "data_types": sorted(arguments.data_types),
        "answer_kinds": sorted(arguments.answer_kinds),
        "sources": sorted(arguments.sources),
        "eval_share": arguments.eval_share,
        "seed": arguments.seed,
        "skip_media_check": arguments.skip_media_check,
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vlm-pg prepare video_r1", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--annotations", type=Path, required=True, help="the data set's JSON file (JSONL, Parquet and FOLDER:split too)"
    )
    add("--media-root", type=Path, required=True, help="folder that the paths in the annotations start from")
    add("--out", type=Path, required=True, help="folder to write; it holds this one set")
    add("--data-types", nargs="+", choices=DATA_TYPES, default=list(DATA_TYPES), help="keep these (default: all)")
    add("--answer-kinds", nargs="+", choices=ANSWER_KINDS, default=list(ANSWER_KINDS), help="keep these (default: all)")
    add("--sources", nargs="+", default=[], metavar="NAME", help="keep these data_source names (default: all)")
    add("--eval-share", type=float, default=0.01, help="share of the media set apart for evaluation (default 0.01)")
    add("--seed", type=int, default=0, help="decides which media are set apart (default 0)")
    add("--skip-media-check", action="store_true", help="do not look whether the media are there")
    add("--overwrite", action="store_true", help="replace what was prepared with other arguments")
    arguments = parser.parse_args(argv)
    if not 0.0 <= arguments.eval_share < 1.0:
        raise ConfigError(
            f"--eval-share is {arguments.eval_share}. At least 0 and less than 1 is allowed. Choose for example 0.01."
        )
    return arguments


if __name__ == "__main__":
    raise SystemExit(run(main))
