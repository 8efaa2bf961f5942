"""Turning pydantic's findings into sentences: what came from where, what is allowed, what to do next."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

# Keys that people write and that are said in another way here.
_INSTEAD = {
    "observe.tensorboard": "Write observe.trackers=[tensorboard] for true, observe.trackers=[] for false.",
}


def describe(
    error: ValidationError, model: type[BaseModel], sources: Mapping[str, str], default_source: str
) -> list[str]:
    """One sentence group per fault, in the order of the sections.

    Args:
        error: what pydantic found when ``model`` was validated.
        model: the composed configuration, whose fields are sections.
        sources: dotted key -> the file, or the command line, that set it.
        default_source: where to add what is missing.
    """
    return [_describe_one(details, model, sources, default_source) for details in error.errors()]


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that ``model`` knows, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        section = _section_of(info)
        if section is not None:
            yield from known_keys(section, f"{prefix}{name}.")


def nearest_keys(key: str, model: type[BaseModel]) -> list[str]:
    """Known keys that ``key`` was probably meant to be, best first; several if its name stands in several sections."""
    known = list(known_keys(model))
    section, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.8)
    if close:
        return close
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    if same_name:
        return same_name
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if close:
        return close
    if not section:
        begun = [name for name in siblings if key and name.startswith(key)]
        close = begun or difflib.get_close_matches(key, siblings, n=1, cutoff=0.65)
        if close:
            return close
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    return [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=1, cutoff=0.7)]


def _describe_one(
    details: ErrorDetails, model: type[BaseModel], sources: Mapping[str, str], default_source: str
) -> str:
    key = ".".join(str(part) for part in details["loc"])
    source = _source_of(key, sources, default_source)
    if details["type"] == "extra_forbidden":
        return f"{key} ({source}) is not a known setting. {_INSTEAD.get(key) or _suggestion(key, model)}"
    if details["type"] == "value_error":
        # A validator of ours: its message already has its three parts, but names keys without their section.
        message = details["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
        return f"{key}: {message}" if key else message
    # Lists and mappings are set as a whole, so what follows an index is not part of the key to write.
    settable = ".".join(itertools.takewhile(lambda part: part != "[key]", map(str, _without_indices(details["loc"]))))
    field = _field_at(details["loc"], model)
    meaning = f" {field.description}" if field is not None and field.description else ""
    if details["type"] == "missing" and settable == key:
        return f"{key} is missing.{meaning} Add it to {default_source}, or pass {key}=VALUE."
    message = details["msg"][:1].lower() + details["msg"][1:]
    if details["type"] == "model_type":
        message = f"it is a section and must be a mapping of settings, such as {settable}: {{KEY: VALUE}}"
    return f"{key} is {_shown(details['input'])} ({source}): {message}.{meaning} Correct it, or pass {settable}=VALUE."


def _suggestion(key: str, model: type[BaseModel]) -> str:
    near = nearest_keys(key, model)
    section = key.rpartition(".")[0]
    allowed = ", ".join(name for name in known_keys(model) if name.rpartition(".")[0] == section)
    advice = f"Did you mean {' or '.join(near)}?" if near else "Remove it."
    return f"{advice} Known here: {allowed}."


def _without_indices(loc: tuple[int | str, ...]) -> Iterator[int | str]:
    return itertools.takewhile(lambda part: not isinstance(part, int), loc)


def _source_of(key: str, sources: Mapping[str, str], default_source: str) -> str:
    """Who set ``key``, or the nearest enclosing mapping or list that is known to have been set."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return default_source


def _field_at(loc: tuple[int | str, ...], model: type[BaseModel]) -> FieldInfo | None:
    section: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in loc:
        if section is None or part not in section.model_fields:
            return info
        info = section.model_fields[str(part)]
        section = _section_of(info)
    return info


def _section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The settings class of a section; of one that may be left out (``Section | None``) too."""
    for annotation in (info.annotation, *get_args(info.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
