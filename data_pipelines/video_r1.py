"""Video-R1: its annotation file (Video-R1-260k.json and others of that layout) to checked train and eval records.

    python -m data_pipelines.video_r1 --annotations Video-R1-260k.json --media-root Video-R1-data --out data/video_r1

Every record is checked: its fields, that its media lie below the media root, that its gold answer earns the full
reward. Refused records go to ``refused.jsonl`` with their reason; ``report.json`` counts everything that was kept, left
out by a filter, or refused. Media are not copied: set ``data.media_root`` to the media root in the training config.
Evaluation records are chosen by their media, so that no image or video is in both files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_pipelines.common import (
    MANIFEST,
    check_gold_answer,
    is_prepared,
    locked,
    progress,
    run,
    write_manifest,
    write_text,
)
from vlm_pg.data.records import read_records, write_records
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.media.paths import resolve
from vlm_pg.types import ANSWER_KINDS, BadSample, Sample

OUTPUTS = ("train.jsonl", "eval.jsonl", "refused.jsonl", "report.json")
DATA_TYPES = ("image", "video", "mixed", "text")


@dataclass
class Outcome:
    """What became of each record: kept for one of the two files, left out by a filter (by its name), or refused."""

    train: list[Sample] = field(default_factory=list)
    evaluation: list[Sample] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: list[BadSample] = field(default_factory=list)


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
        samples, unreadable = read_records(arguments.annotations)
        outcome = sort_samples(samples, arguments)
        outcome.refused[:0] = unreadable
        if not outcome.train:
            raise ConfigError(_nothing_left(len(samples) + len(unreadable), outcome, arguments.annotations))
        files = _write(out, outcome, arguments)
        write_manifest(out, identity, files)
    print(_summary(outcome))
    print(f"Wrote {', '.join(files)} to {out}. Train with data.media_root={arguments.media_root}.")
    return 0


def sort_samples(samples: Sequence[Sample], arguments: argparse.Namespace) -> Outcome:
    """Put each sample where it belongs. Filters come first: what nobody asked for need not be right."""
    outcome = Outcome()
    where = arguments.annotations.name
    for sample in progress(samples, len(samples), "Checking records"):
        if filtered_by := _filtered_by(sample, arguments):
            outcome.left_out[filtered_by] += 1
            continue
        try:
            for ref in sample.media:
                if not arguments.skip_media_check:
                    resolve(ref, arguments.media_root)
            check_gold_answer(sample)
        except SampleError as error:
            outcome.refused.append(BadSample(sample.sample_id, error.reason, str(error), where))
            continue
        sides = {_is_for_evaluation(key, arguments) for key in _split_keys(sample)}
        if len(sides) == 2:
            outcome.left_out["media in both files"] += 1
        elif True in sides:
            outcome.evaluation.append(sample)
        else:
            outcome.train.append(sample)
    return outcome


def data_type(sample: Sample) -> str:
    """image, video, mixed or text."""
    kinds = {ref.kind for ref in sample.media}
    return "text" if not kinds else "mixed" if len(kinds) == 2 else kinds.pop()


def _filtered_by(sample: Sample, arguments: argparse.Namespace) -> str | None:
    """The name of the filter that leaves a sample out; None if all let it pass."""
    if data_type(sample) not in arguments.data_types:
        return f"data type {data_type(sample)}"
    if sample.answer_kind not in arguments.answer_kinds:
        return f"answer kind {sample.answer_kind}"
    if arguments.sources and sample.source not in arguments.sources:
        return f"source {sample.source}"
    return None


def _split_keys(sample: Sample) -> tuple[str, ...]:
    """What decides between train and eval: the media, or without media the question itself."""
    paths = tuple(ref.path.removeprefix("./") for ref in sample.media)
    return paths or (sample.question,)


def _is_for_evaluation(key: str, arguments: argparse.Namespace) -> bool:
    """A fixed share of all keys, whatever else the file holds."""
    digest = hashlib.sha256(f"{arguments.seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < arguments.eval_share * 2**64


def _write(out: Path, outcome: Outcome, arguments: argparse.Namespace) -> dict[str, int]:
    """Write the four files; returns the number of records in each that holds records."""
    write_records(out / "train.jsonl", outcome.train)
    write_records(out / "eval.jsonl", outcome.evaluation)
    lines = (json.dumps(asdict(bad), ensure_ascii=False) + "\n" for bad in outcome.refused)
    write_text(out / "refused.jsonl", "".join(lines))
    kept = [*outcome.train, *outcome.evaluation]
    report = {
        "annotations": str(arguments.annotations),
        "media_root": str(arguments.media_root),
        "train": len(outcome.train),
        "eval": len(outcome.evaluation),
        "kept_by_data_type": Counter(map(data_type, kept)),
        "kept_by_answer_kind": Counter(sample.answer_kind for sample in kept),
        "kept_by_source": Counter(sample.source for sample in kept),
        "left_out": outcome.left_out,
        "refused": Counter(bad.reason for bad in outcome.refused),
    }
    write_text(out / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return {
        "train.jsonl": len(outcome.train),
        "eval.jsonl": len(outcome.evaluation),
        "refused.jsonl": len(outcome.refused),
    }


def _summary(outcome: Outcome) -> str:
    """A few lines for people: how many were kept, left out and refused, and why."""
    lines = [f"kept     {len(outcome.train)} for training, {len(outcome.evaluation)} for evaluation"]
    lines += [f"left out {count:6}  {name}" for name, count in outcome.left_out.most_common()]
    reasons = Counter(bad.reason for bad in outcome.refused)
    for reason, count in reasons.most_common():
        example = next(bad for bad in outcome.refused if bad.reason == reason)
        lines.append(f"refused  {count:6}  {reason}, for example {example.sample_id}: {example.message}")
    return "\n".join(lines)


def _nothing_left(total: int, outcome: Outcome, annotations: Path) -> str:
    return (
        f"None of the {total} records of '{annotations}' is left for training. At least one is needed.\n"
        f"{_summary(outcome)}\nCorrect --media-root, or widen the filters."
    )


def _identity(arguments: argparse.Namespace) -> dict[str, object]:
    """What the result depends on, as JSON values; the annotation file by its size and time of change."""
    if not arguments.annotations.is_file():
        raise ConfigError(
            f"Annotation file '{arguments.annotations}' does not exist. A file in Video-R1's format is expected. "
            "Correct --annotations."
        )
    if not arguments.media_root.is_dir():
        raise ConfigError(
            f"Media root '{arguments.media_root}' is not a folder. The folder that the paths in the annotation file "
            "start from is expected. Correct --media-root."
        )
    state = arguments.annotations.stat()
    return {
        "pipeline": "video_r1",
        "annotations": str(arguments.annotations.resolve()),
        "annotations_bytes": state.st_size,
        "annotations_changed_ns": state.st_mtime_ns,
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
    add("--annotations", type=Path, required=True, help="the data set's JSON file (JSONL and Parquet are read too)")
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
