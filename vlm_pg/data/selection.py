"""``vlm-pg select``: sampled responses to a prepared set, for supervised training (rejection sampling) or as pairs."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlm_pg.data.prepared import ShardWriter, to_row
from vlm_pg.data.records import parse_record
from vlm_pg.data.sample_sets import ids_of, named_id, open_records
from vlm_pg.data.sampled import PROTOCOL, SampledFile
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.files import write_json_atomic
from vlm_pg.types import Sample

REPORT = "selection.json"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_-]{1,100})=(?P<path>.+)")


@dataclass(frozen=True)
class Selection:
    """Which responses are selected.

    ``pairs``: of right and wrong responses; else right ones alone. ``min_accuracy``: of a right response.
    ``difficulty``: bounds of a question's p_correct, included; None: all questions. ``per_question``: most responses or
    pairs of a question, in an order drawn from ``seed``; None: all.
    """

    pairs: bool = False
    min_accuracy: float = 1.0
    difficulty: Sequence[float] | None = None
    per_question: int | None = None
    min_tokens: int = 1
    max_tokens: int | None = None
    seed: int = 0


def records_of(samples: Path, records: Sequence[str]) -> DataSettings:
    """The records that were sampled and their media roots.

    Args:
        records: PATH or NAME=PATH each; empty: as the protocol.json of ``samples`` says.

    Raises:
        ConfigError: no records are given, and there is no protocol.json.
    """
    folder, known = samples if samples.is_dir() else samples.parent, {}
    try:
        known = json.loads((folder / PROTOCOL).read_bytes())["config"]["data"]
        known = {key: known[key] for key in ("train", "media_root")}
    except (OSError, ValueError, KeyError, TypeError):
        if not records:
            raise ConfigError(
                f"{folder} has no {PROTOCOL} of vlm-pg sample, which says what records were sampled. Give them with "
                "--records PATH, or --records NAME=PATH for each set."
            ) from None
    matches = [_NAMED.fullmatch(one) for one in records]
    if len(records) > 1 and not all(matches):
        raise ConfigError(f"--records is {', '.join(records)}. Of several sets each needs a name: NAME=PATH. Add it.")
    if records:
        known["train"] = {match["name"]: match["path"] for match in matches if match} or records[0]
    return DataSettings(**known)


def select(samples: Path, data: DataSettings, out: Path, wanted: Selection) -> list[str]:
    """Write the selected responses as a prepared set, of several sets one each; lines about what was selected.

    A response becomes the only turn of its question's record, in a pair beside the rejected one.

    Raises:
        ConfigError: samples or records cannot be read, ``out`` exists, or nothing is selected.
    """
    if wanted.difficulty is not None and not 0 <= wanted.difficulty[0] <= wanted.difficulty[1] <= 1:
        came = " ".join(f"{bound:g}" for bound in wanted.difficulty)
        raise ConfigError(f"--difficulty is {came}. LOW and HIGH with 0 <= LOW <= HIGH <= 1 are expected. Correct it.")
    if out.exists():
        raise ConfigError(f"{out} exists already. The set is written to a new folder. Remove it, or choose another.")
    sampled = SampledFile(samples)
    selector, written = _Selector(wanted), dict[str, int]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        whole = Path(temporary) / "whole"
        whole.mkdir()
        for name, path in data.train_sets.items():
            selected = selector.of_set(sampled, name, path)
            if (first := next(selected, None)) is None:
                continue
            (whole / name).mkdir(exist_ok=True)
            writer = ShardWriter(whole / name, "train")
            for one in chain([first], selected):
                writer.add(to_row(one))
            written[name] = sum(writer.close().values())
        selector.removed["rows of the samples without a record"] = len(sampled.p_correct) - selector.questions
        lines = selector.lines()
        if not written:
            raise ConfigError(
                f"Nothing of {sampled.path} is selected: {'; '.join(lines)}. Sample more, or widen the selection."
            )
        report = {"samples": str(sampled.path), "selection": asdict(wanted), "written": written, "lines": lines}
        write_json_atomic(whole / REPORT, report)
        whole.rename(out)
    roots = {name: str(data.root_for(data.train_sets[name], name)) for name in written}
    trains = _override("data.train", {name: f"{out / name}:train" for name in written})
    objective = "dpo" if wanted.pairs else "sft"
    return [*lines, f"train with training.objective={objective} {trains} {_override('data.media_root', roots)}"]


def _override(key: str, by_name: Mapping[str, str]) -> str:
    one = by_name.get("")
    return f"{key}={one}" if one else f"'{key}={{{', '.join(f'{name}: {path}' for name, path in by_name.items())}}}'"


class _Selector:
    """Selects responses and counts what each filter removes. ``questions``: records with a row so far."""

    def __init__(self, wanted: Selection):
        self._wanted, self._what = wanted, "pairs" if wanted.pairs else "responses"
        self.questions = self._responses = self._selected = self._of_questions = 0
        self.removed: Counter[str] = Counter()

    def of_set(self, sampled: SampledFile, name: str, path: Path) -> Iterator[Sample]:
        """The selected responses to a set's questions, each in a record of its own."""
        records, bad = open_records(path)
        self.removed["records that cannot be read"] += len(bad)
        ids = (named_id(one, name) for one in ids_of(records))
        for record, row in zip(records, sampled.rows(ids), strict=True):
            if row is None:
                self.removed["records that were not sampled"] += 1
                continue
            self.questions += 1
            self._responses += len(row["responses"])
            selected = self._of_question(record, row)
            self._selected += len(selected)
            self._of_questions += bool(selected)
            yield from selected

    def lines(self) -> list[str]:
        """What was selected, and what each filter removed."""
        return [
            f"selected: {self._selected:,} {self._what} of {self._of_questions:,} questions, from {self._responses:,} "
            f"responses of {self.questions:,} questions",
            *(f"removed: {count:,} {reason}" for reason, count in self.removed.items() if count),
        ]

    def _of_question(self, record: Sample, row: Mapping[str, Any]) -> list[Sample]:
        if "fault" in row:
            self.removed["questions that could not be sampled"] += 1
            return []
        wanted = self._wanted
        if (bounds := wanted.difficulty) is not None:
            value = row["p_correct"]
            if value is None or not bounds[0] <= value <= bounds[1]:
                self.removed[f"questions outside --difficulty {bounds[0]:g} {bounds[1]:g}"] += 1
                return []
        usable: dict[bool, list[Sample]] = {True: [], False: []}
        texts: set[str] = set()
        for number, response in enumerate(row["responses"]):
            text = row.get("opened", "") + response["text"]
            try:
                is_right = self._judged(response)
                if text.strip() in texts:
                    raise _Removed("responses with the text of another one of their question")
                one = replace(record, sample_id=f"{record.sample_id}-{number}", turns=(text,), process="", rejected="")
                parse_record(to_row(one))
            except _Removed as reason:
                self.removed[str(reason)] += 1
            except SampleError as error:
                self.removed[f"responses that no record may have ({error.reason})"] += 1
            else:
                texts.add(text.strip())
                usable[is_right].append(one)
        for ones in usable.values():
            ones.sort(key=self._drawn)
        selected = self._pairs(*usable.values()) if wanted.pairs else usable[True]
        if len(selected) > (most := wanted.per_question or len(selected)):
            self.removed[f"{self._what} above --per-question {most}"] += len(selected) - most
        return selected[:most]

    def _judged(self, response: Mapping[str, Any]) -> bool:
        """Whether a response that can be selected is right."""
        wanted, tokens, accuracy = self._wanted, response["tokens"], response["accuracy"]
        if response["finish_reason"] == "length":
            raise _Removed("responses cut off at rollout.max_new_tokens")
        if accuracy is None:
            raise _Removed("responses without an accuracy")
        if tokens < wanted.min_tokens or (wanted.max_tokens is not None and tokens > wanted.max_tokens):
            raise _Removed("responses outside --min-tokens and --max-tokens")
        is_right: bool = accuracy >= wanted.min_accuracy
        if not is_right and not wanted.pairs:
            raise _Removed(f"responses with an accuracy below {wanted.min_accuracy:g}")
        return is_right

    def _drawn(self, one: Sample) -> bytes:
        return hashlib.sha256(f"{self._wanted.seed}/{one.sample_id}".encode("utf-8", "backslashreplace")).digest()

    def _pairs(self, right: Sequence[Sample], wrong: Sequence[Sample]) -> list[Sample]:
        """Each response is in one pair at most."""
        count = min(len(right), len(wrong))
        self.removed["responses without a counterpart for a pair"] += len(right) + len(wrong) - 2 * count
        pairs = zip(right[:count], wrong[:count], strict=True)
        return [replace(chosen, rejected=rejected.turns[0]) for chosen, rejected in pairs]


class _Removed(Exception):
    """A response that is not selected; its text says which."""
