"""Readers and aggregations of the user's own, which a protocol names by path: "my_set.py:read", "package.module:read".

A reader is called with (question, output, whether it was cut off) and gives a ``Reading``; an aggregation with all
questions of a set and gives a ``Table``. In the place of a function a class may stand, which is made once, without
arguments, and then called in the same way.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vlm_pg.cache.provenance import source_digest
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.contracts import Answered, Reader, Reading
from vlm_pg.eval.tables import Table
from vlm_pg.functions import load_function
from vlm_pg.types import Sample

_READER, _AGGREGATION = "reader of a protocol", "aggregation of a protocol"
_READING = (
    "A vlm_pg.eval.contracts.Reading is expected: its answer a text or None, its score from 0 to 1, or None where the "
    "question itself has no value."
)


def is_own(name: str) -> bool:
    """Whether the name of a reader or an aggregation is that of the user's own."""
    return ":" in name


def own_reader(name: str) -> Reader:
    """The reader of that name; what it gives is checked.

    Raises:
        ConfigError: it cannot be found, imported or called as readers are; when called: it raises, or gives something
            else than a reading.
    """
    function = _loaded(name, _READER, "(sample, output, truncated)", 3)

    def read(sample: Sample, output: str, truncated: bool) -> Reading:
        try:
            found = function(sample, output, truncated)
        except Exception as error:
            came = f"raises {type(error).__name__}: {error}"
            raise _refused(name, _READER, came, _READING, sample.sample_id) from error
        if not _is_reading(found):
            raise _refused(name, _READER, f"gave {_shown(found)}", _READING, sample.sample_id)
        return found

    return read


def own_aggregation(name: str) -> tuple[str, Callable[[Sequence[Answered]], Table]]:
    """The rule in words (the first line of its docstring, else its name), and the aggregation; its table is checked.

    Raises:
        ConfigError: as of ``own_reader``.
    """
    function = _loaded(name, _AGGREGATION, "(answered)", 1)
    expected = "A vlm_pg.eval.tables.Table is expected, whose main is the name of one of its figures."

    def tabulate(answered: Sequence[Answered]) -> Table:
        try:
            table = function(answered)
        except Exception as error:
            came = f"raises {type(error).__name__}: {error}"
            raise _refused(name, _AGGREGATION, came, expected) from error
        if not isinstance(table, Table) or table.main not in table.figures:
            raise _refused(name, _AGGREGATION, f"gave {_shown(table)}", expected)
        return table

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
        place = name.rpartition(":")[0]
        file = place if place.endswith(".py") else importlib.import_module(place).__file__
        sources[name] = "" if file is None else source_digest([Path(file).expanduser()])
    return sources


def _loaded(name: str, what: str, form: str, parameters: int) -> Callable[..., Any]:
    made = load_function(name, f"the {what}")
    try:
        function = made() if isinstance(made, type) else made
        inspect.signature(function).bind(*range(parameters))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The {what}, '{printable(name, 300)}', cannot be called: {error}. A function with the parameters {form} "
            "is expected, or a class that is made without arguments and called with them. Correct it."
        ) from error
    return function


def _is_reading(found: Any) -> bool:
    if not isinstance(found, Reading) or not isinstance(found.answer, str | None):
        return False
    score = found.score
    return score is None or (isinstance(score, int | float) and 0.0 <= score <= 1.0)


def _refused(name: str, what: str, came: str, expected: str, sample_id: str | None = None) -> ConfigError:
    where = "" if sample_id is None else f" for question {printable(sample_id, 200)!r}"
    return ConfigError(f"The {what}, '{printable(name, 300)}', {printable(came, 500)}{where}. {expected} Correct it.")


def _shown(value: Any) -> str:
    return f"{str(value)[:200]} ({type(value).__name__})"
