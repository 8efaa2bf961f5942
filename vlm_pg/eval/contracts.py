"""Records of evaluation.

(Sample, output) -> Reading            a reader: whole outputs or a published rule (``vlm_pg/answers``)
Sample, n Readings -> Answered         one question; a line of ``answers.jsonl``
Answered of a whole set -> figures     ``measures.py``, ``aggregation.py``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vlm_pg.answers.verdict import Reader as Reader
from vlm_pg.answers.verdict import Reading as Reading
from vlm_pg.types import AnswerKind, FinishReason, Sample


@dataclass(frozen=True)
class Judged:
    """A judge model's decision about an output, beside the reading of the rules (``judging/``).

    ``form``: of its question. ``decided``: whether its reply could be used. ``answer``: the answer it found, if any.
    ``score``: with its decision; where there is none, that of the rules. ``note``: why it has not decided. ``reply``:
    the end of its reply.
    """

    form: str
    decided: bool
    answer: str | None
    score: float | None
    note: str = ""
    reply: str = ""


@dataclass(frozen=True)
class Output:
    """One answer of a model to a question. ``num_tokens``: its length, end token included; None if unknown.

    ``judged``: by a judge model, if there is one; comparisons of results ignore it.
    """

    text: str
    reading: Reading
    finish_reason: FinishReason | None = None
    num_tokens: int | None = None
    judged: Judged | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Answered:
    """One question of an evaluation set and its n outputs, or why it could not be asked.

    ``cluster``: questions of one video (of one clip's whole file), or of one image, have the same; of a question
    without media its own id. ``num_options``: 0 where nothing is chosen. ``fault``: (reason, message) of a question
    whose media or prompt could not be used; it has no outputs then.
    """

    sample_id: str
    question: str
    options: tuple[str, ...]
    gold: str
    kind: AnswerKind
    category: str
    cluster: str
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    outputs: tuple[Output, ...] = ()
    fault: tuple[str, str] | None = None

    @classmethod
    def of(cls, sample: Sample, outputs: tuple[Output, ...], fault: tuple[str, str] | None = None) -> Answered:
        """A question as its sample has it."""
        return cls(
            sample_id=sample.sample_id,
            question=sample.question,
            options=sample.options,
            gold=sample.answer,
            kind=sample.answer_kind,
            category=sample.category,
            cluster=cluster_of(sample),
            details=sample.details,
            outputs=outputs,
            fault=fault,
        )

    @property
    def num_options(self) -> int:
        """Options to choose one of; 0 where none is to be chosen."""
        return len(self.options) if self.kind == "multiple_choice" else 0

    @property
    def score(self) -> float | None:
        """Mean over the outputs that count and have a value (mean@n); None without any."""
        scores = [o.reading.score for o in self.outputs if o.reading.counts and o.reading.score is not None]
        return sum(scores) / len(scores) if scores else None

    def to_row(self) -> dict[str, Any]:
        """As JSON has it; ``from_row`` is the inverse."""
        row = asdict(self)
        for output in row["outputs"]:
            output.update(output.pop("reading"))  # flat: what was read beside the text
            if output["judged"] is None:
                del output["judged"]
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Answered:
        """The question of a row of ``to_row``; unknown keys are ignored.

        Raises:
            KeyError, TypeError: it is no such row.
        """
        if not all(isinstance(one["score"], int | float | None) for one in row["outputs"]):
            raise TypeError("a score is no number")
        outputs = tuple(
            Output(
                one["text"],
                Reading(one["answer"], one["score"], one["note"], one["counts"]),
                one["finish_reason"],
                one["num_tokens"],
                Judged(**one["judged"]) if one.get("judged") else None,
            )
            for one in row["outputs"]
        )
        names = ("sample_id", "question", "gold", "kind", "category", "cluster", "details")
        fault = None if row["fault"] is None else (row["fault"][0], row["fault"][1])
        return cls(**{name: row[name] for name in names}, options=tuple(row["options"]), outputs=outputs, fault=fault)


def cluster_of(sample: Sample) -> str:
    """The media of a question, whichever part of them is shown: one draw for the standard error."""
    return "|".join(ref.path for ref in sample.media) or sample.sample_id
