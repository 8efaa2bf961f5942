"""Readers of outputs: training's reader of the answer block ("strict"), ours, a published rule, or the user's own.

A protocol names readers and aggregations of the user's own by path: "my_set.py:read", "package.module:name". A reader
is called with (question, output, whether it was cut off) and returns a ``Reading``; an aggregation with all questions
of a set, and returns a ``Table``. A class is instantiated once, without arguments, and then called in the same way.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlm_pg.answers.choices import named_letters
from vlm_pg.cache.provenance import source_digest
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.contracts import Answered, Reader, Reading
from vlm_pg.eval.protocols.protocol import Protocol
from vlm_pg.eval.tables import Table
from vlm_pg.functions import load_function
from vlm_pg.rewards.parts import read_answer
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import RewardBreakdown, Sample

if TYPE_CHECKING:
    from vlm_pg.answers.whole import WholeReader

ReaderKind = Literal["strict", "ours", "published"]
OURS: Literal["ours"] = "ours"


def reader_name(chosen: ReaderKind | None, protocol: Protocol | None) -> str:
    """ "strict", "ours", or the name of the published rule or of the user's own reader that reads a set.

    Args:
        chosen: as ``eval.reader`` says; None: ours where there is a protocol, unless it names a reader of the user's
            own, else strict.
        protocol: the set's.
    """
    if protocol is None:
        return OURS if chosen == OURS else "strict"
    if chosen == "published" or (chosen is None and is_own(protocol.reader)):
        return protocol.reader
    return chosen or OURS


def reader_of(name: str, protocol: Protocol | None, whole: WholeReader) -> Reader | None:
    """The reader of that name, behind the beginning that the protocol counts as part of an answer; None for "strict",
    which is the rewarder.

    Raises:
        ConfigError: there is no such published rule, or the user's own reader cannot be used.
    """
    if name == "strict":
        return None
    if name == OURS or is_own(name):
        reader = whole.read if name == OURS else own_reader(name)
    else:
        from vlm_pg.answers.published import published_rule  # the trainer reads by no published rule

        reader = published_rule(name)
    if protocol is None or not protocol.read_prefix:
        return reader
    return lambda sample, output, truncated: reader(sample, protocol.read_prefix + output, truncated)


def strict_reading(sample: Sample, text: str, reward: RewardBreakdown, settings: RewardSettings) -> Reading:
    """The reading of a response by training's reward.

    Its score is the part "accuracy", so a response without an answer block scores 0. The answer is the content of the
    block, spelled alike where answers are alike, as far as that is possible without a checker; of a choice the letter
    that it names; None where there is no block or it names several options.
    """
    read = read_answer(text, settings)
    if sample.answer_kind == "multiple_choice":
        named = named_letters(read.text, sample.options) if read.text else set()
        answer = next(iter(named)) if len(named) == 1 else None
    else:
        answer = " ".join(read.text.casefold().split()) or None
    return Reading(answer, reward.parts.get("accuracy"), reward.notes.get("accuracy", read.fault))


def is_own(name: str) -> bool:
    """Whether a reader or an aggregation of that name is the user's own."""
    return ":" in name


def own_reader(name: str) -> Reader:
    """The reader of that name, with a check of what it returns.

    Raises:
        ConfigError: it cannot be found, imported or called as readers are; when called: it raises, or returns something
            else than a reading.
    """
    kind = "reader of a protocol"
    expected = (
        "A vlm_pg.eval.contracts.Reading is expected: its answer a text or None, its score from 0 to 1, or None where "
        "the question itself has no value."
    )
    function = _callable(name, kind, "(sample, output, truncated)", 3)

    def read(sample: Sample, output: str, truncated: bool) -> Reading:
        where = f" for question {printable(sample.sample_id, 200)!r}"
        found = _checked(name, kind, lambda: function(sample, output, truncated), _is_reading, expected, where)
        assert isinstance(found, Reading)
        return found

    return read


def own_aggregation(name: str) -> tuple[str, Callable[[Sequence[Answered]], Table]]:
    """The rule in words (the first line of its docstring, else its name), and the aggregation; its table is checked.

    Raises:
        ConfigError: as of ``own_reader``.
    """
    kind = "aggregation of a protocol"
    expected = "A vlm_pg.eval.tables.Table is expected, whose main is the name of one of its figures."
    function = _callable(name, kind, "(answered)", 1)

    def is_table(found: Any) -> bool:
        return isinstance(found, Table) and found.main in found.figures

    def tabulate(answered: Sequence[Answered]) -> Table:
        found = _checked(name, kind, lambda: function(answered), is_table, expected)
        assert isinstance(found, Table)
        return found

    described = (inspect.getdoc(function) or "").splitlines()
    return (described[0].rstrip(".") if described else name), tabulate


def own_sources(names: Iterable[str]) -> dict[str, str]:
    """A digest of the file of each of these that is the user's own: another text of it may read otherwise.

    Raises:
        ConfigError: as of ``load_function``.
    """
    sources = {}
    for name in filter(is_own, names):
        load_function(name, "a protocol")
        module = name.rpartition(":")[0]
        file = module if module.endswith(".py") else importlib.import_module(module).__file__
        sources[name] = "" if file is None else source_digest([Path(file).expanduser()])
    return sources


def _callable(name: str, kind: str, form: str, parameters: int) -> Callable[..., Any]:
    loaded = load_function(name, f"the {kind}")
    try:
        function = loaded() if isinstance(loaded, type) else loaded
        inspect.signature(function).bind(*range(parameters))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The {kind}, '{printable(name, 300)}', cannot be called: {error}. A function with the parameters {form} "
            "is expected, or a class that is made without arguments and called with them. Correct it."
        ) from error
    return function


def _checked(
    name: str, kind: str, call: Callable[[], Any], fits: Callable[[Any], bool], expected: str, where: str = ""
) -> Any:
    """The result of a call, or ConfigError where it raises or returns something else."""
    cause = None
    try:
        found = call()
        if fits(found):
            return found
        came = f"gave {str(found)[:200]} ({type(found).__name__})"
    except Exception as error:
        cause, came = error, f"raises {type(error).__name__}: {error}"
    raise ConfigError(
        f"The {kind}, '{printable(name, 300)}', {printable(came, 500)}{where}. {expected} Correct it."
    ) from cause


def _is_reading(found: Any) -> bool:
    if not isinstance(found, Reading) or not isinstance(found.answer, str | None):
        return False
    score = found.score
    return score is None or (isinstance(score, int | float) and 0.0 <= score <= 1.0)
