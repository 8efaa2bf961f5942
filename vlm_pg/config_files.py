"""Config files: YAML with includes and overrides, the source of each value, and error messages that name it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vlm_pg.errors import ConfigError, printable

COMMAND_LINE = "command line"
INCLUDE = "include"


@dataclass
class ConfigTree:
    """Merged values, and the source of each dotted key: the file, or the command line, that set it last."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def merge(self, values: Mapping[str, Any], source: str) -> None:
        """Merge ``values``: mappings key by key, anything else replaces."""
        _merge(self.values, values, self.sources, source, prefix="")

    def clear(self, parts: Sequence[str]) -> None:
        """Remove the value of a dotted key."""
        values: Any = self.values
        for part in parts[:-1]:
            values = values.get(part) if isinstance(values, dict) else None
        if isinstance(values, dict):
            values.pop(parts[-1], None)

    def scalar_above(self, parts: Sequence[str]) -> tuple[str, Any] | None:
        """Key and value of a scalar or list where a dotted key needs a mapping, if there is one."""
        values: Any = self.values
        for depth, part in enumerate(parts[:-1], start=1):
            values = values.get(part)
            if values is None:
                return None
            if not isinstance(values, dict):
                return ".".join(parts[:depth]), values
        return None


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node))
        return super().construct_mapping(node, deep)


def apply_override(tree: ConfigTree, override: str) -> None:
    """Set one ``dotted.key=value`` in ``tree``; the value is read as YAML.

    Raises:
        ConfigError: no equals sign, an empty part in the key, a value that is not YAML, or a key inside of a value that
            has none.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(part.strip() for part in parts):
        raise ConfigError(
            f"The override {override!r} cannot be read. Overrides are key=value with a dotted key. "
            "Write for example training.steps=5."
        )
    try:
        value = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of the override {override!r} is not YAML: {str(error).splitlines()[0]}. Allowed is one YAML "
            "value. Put text with special characters in double quotes inside single quotes: 'run.name=\"...\"'."
        ) from None
    if above := tree.scalar_above(parts):
        key, held = above
        what = f"a list of {len(held)}" if isinstance(held, list) else printable(str(held), 120)
        raise ConfigError(
            f"The override {printable(repr(override), 300)} names a key inside of {key}, which is {what} "
            f"({tree.sources.get(key, 'set before')}) and would be lost. What is no mapping is set as a whole. Write "
            f"'{key}=VALUE' with all of it, as in 'data.train={{one: a.jsonl, two: b.jsonl}}', or change the file."
        )
    if isinstance(value, dict) and len(parts) > 1:
        # A mapping replaces a setting: data.eval={} discards what files set. A section (training={steps: 5}) is merged
        # like a file.
        tree.clear(parts)
    for part in reversed(parts):
        value = {part: value}
    tree.merge(value, COMMAND_LINE)


def read_tree(path: Path, chain: tuple[Path, ...] = ()) -> ConfigTree:
    """Values of ``path`` with its includes merged below it; ``chain``: the files that include it.

    Raises:
        ConfigError: a file is missing, unreadable or no mapping; ``include`` is no list of paths, or goes in a circle.
    """
    resolved = path.resolve()
    if resolved in chain:
        circle = " -> ".join(str(step) for step in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(
            f"Config files include each other: {circle}. Includes must not form a circle. Remove one of these includes."
        )
    values = _read_file(path)
    included = values.pop(INCLUDE, [])
    if not isinstance(included, list) or not all(isinstance(entry, str) for entry in included):
        raise ConfigError(
            f"include in {path} is {included!r}. It must be a list of paths relative to that file. "
            "Write include: [base.yaml]."
        )
    tree = ConfigTree()
    for entry in included:
        below = read_tree(path.parent / entry, (*chain, resolved))
        _merge(tree.values, below.values, {}, "", prefix="")
        tree.sources.update(below.sources)
    tree.merge(values, str(path))
    return tree


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The config file {path} cannot be read: {error}. It must be an existing YAML file in UTF-8. "
            "Check the path; the shipped ones lie in configs/."
        ) from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"The config file {path} is not valid YAML: {error}. Correct it there.") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            f"The config file {path} holds {type(values).__name__}, not sections. It must be a YAML mapping of "
            "sections such as model, data and training. See configs/embedded.yaml for one."
        )
    return values


def _merge(
    target: dict[str, Any], values: Mapping[Any, Any], sources: dict[str, str], source: str, prefix: str
) -> None:
    for raw_key, value in values.items():
        key = str(raw_key)
        dotted = f"{prefix}{key}"
        if value is None and not prefix and isinstance(target.get(key), dict):
            continue  # an empty section ("eval:") changes nothing
        if isinstance(value, Mapping):
            below = target.get(key)
            if not isinstance(below, dict):
                below = target[key] = {}
            sources.setdefault(dotted, source)
            _merge(below, value, sources, source, prefix=f"{dotted}.")
        else:
            target[key] = value
            sources[dotted] = source


# Frequent wrong keys with another spelling here.
_INSTEAD = {"observe.tensorboard": "Write observe.trackers=[tensorboard] for true, observe.trackers=[] for false."}


def describe(
    error: ValidationError, model: type[BaseModel], sources: Mapping[str, str], default_source: str
) -> list[str]:
    """A message for each fault, in the order of the sections: value and source, what is allowed, what to do.

    Args:
        error: of validating ``model``, whose fields are sections.
        sources: dotted key -> the file, or the command line, that set it.
        default_source: the file to add missing keys to.
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
    """Known keys that were probably meant by ``key``, best first; several if several sections have its name."""
    known = list(known_keys(model))
    section, _, last = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(key, siblings, n=1, cutoff=0.8):
        return close
    if same_name := [name for name in known if name.rpartition(".")[2] == last]:
        return same_name
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return close
    if not section:
        begun = [name for name in siblings if key and name.startswith(key)]
        if close := begun or difflib.get_close_matches(key, siblings, n=1, cutoff=0.65):
            return close
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    return [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=1, cutoff=0.7)]


def _describe_one(
    details: ErrorDetails, model: type[BaseModel], sources: Mapping[str, str], default_source: str
) -> str:
    key = ".".join(str(part) for part in details["loc"])
    source = _source_of(key, sources, default_source)
    if details["type"] == "extra_forbidden":
        near, section = nearest_keys(key, model), key.rpartition(".")[0]
        allowed = ", ".join(name for name in known_keys(model) if name.rpartition(".")[0] == section)
        advice = f"Did you mean {' or '.join(near)}?" if near else "Remove it."
        advice = _INSTEAD.get(key) or f"{advice} Known here: {allowed}."
        return f"{key} ({source}) is not a known setting. {advice}"
    if details["type"] == "value_error":
        # A validator of ours: its message already has its three parts, but names keys without their section.
        message = details["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
        return f"{key}: {message}" if key else message
    # Lists and mappings are set as a whole, so what follows an index is not part of the key to write.
    is_key = itertools.takewhile(lambda part: not isinstance(part, int) and part != "[key]", details["loc"])
    settable = ".".join(map(str, is_key))
    setting = _field_at(details["loc"], model)
    meaning = f" {setting.description}" if setting is not None and setting.description else ""
    if details["type"] == "missing" and settable == key:
        return f"{key} is missing.{meaning} Add it to {default_source}, or pass {key}=VALUE."
    message = details["msg"][:1].lower() + details["msg"][1:]
    if details["type"] == "model_type":
        message = f"it is a section and must be a mapping of settings, such as {settable}: {{KEY: VALUE}}"
    value = repr(details["input"])
    value = value if len(value) <= 80 else f"{value[:77]}..."
    return f"{key} is {value} ({source}): {message}.{meaning} Correct it, or pass {settable}=VALUE."


def _source_of(key: str, sources: Mapping[str, str], default_source: str) -> str:
    """Source of ``key``, or of the nearest enclosing mapping or list."""
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
