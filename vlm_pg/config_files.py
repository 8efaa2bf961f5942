"""Reading config files: YAML, includes, overrides, and where each value came from."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from vlm_pg.errors import ConfigError, printable

COMMAND_LINE = "command line"
_SHOWN_LIST = 400  # characters; a cut one could not be typed
INCLUDE = "include"


@dataclass
class ConfigTree:
    """Merged values, and for each dotted key the file (or the command line) that set it last."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def merge(self, values: Mapping[str, Any], source: str) -> None:
        """Lay ``values`` over what is here: mappings key by key, everything else replaces."""
        _merge(self.values, values, self.sources, source, prefix="")

    def clear(self, parts: Sequence[str]) -> None:
        """Forget the value under a dotted key, whatever it holds."""
        values: Any = self.values
        for part in parts[:-1]:
            values = values.get(part) if isinstance(values, dict) else None
        if isinstance(values, dict):
            values.pop(parts[-1], None)

    def plain_above(self, parts: Sequence[str]) -> tuple[str, Any] | None:
        """The value without keys that stands where a dotted key needs a mapping, and its own key; None for none."""
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


def read_tree(path: Path) -> ConfigTree:
    """Values of ``path`` with its includes merged below it.

    Raises:
        ConfigError: a file is missing, unreadable or no mapping; ``include`` is no list of paths, or goes in a circle.
    """
    return _read_tree(path, chain=())


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
            f"The value of the override {override!r} is not YAML: {_first_line(error)}. Allowed is one YAML value. "
            "Put text with special characters in double quotes inside single quotes: 'run.name=\"...\"'."
        ) from None
    if plain := tree.plain_above(parts):
        inside = partial(_inside_a_list, value) if isinstance(plain[1], list) else _inside_a_plain_value
        raise ConfigError(inside(tree, override, parts, *plain))
    if isinstance(value, dict) and len(parts) > 1:
        # A mapping given for a setting is meant as a whole: data.eval={} empties what files filled. A whole section
        # (training={steps: 5}) is laid over the files like a file.
        tree.clear(parts)
    for part in reversed(parts):
        value = {part: value}
    tree.merge(value, COMMAND_LINE)


def _inside_a_plain_value(tree: ConfigTree, override: str, parts: Sequence[str], key: str, plain: Any) -> str:
    shown, inner = printable(str(plain), 120), ".".join(parts[key.count(".") + 1 :])
    text = printable(override.partition("=")[2], 120)
    both = f", or '{key}={{NAME: {shown}, {inner}: {text}}}' for both" if isinstance(plain, str) else ""
    return (
        f"The override {printable(repr(override), 300)} names a key inside of {key}, which is {shown} "
        f"({tree.sources.get(key, 'set before')}): a value without keys, which would be lost. Write "
        f"'{key}={{{inner}: {text}}}' to have that in its place{both}."
    )


def _inside_a_list(
    value: Any, tree: ConfigTree, override: str, parts: Sequence[str], key: str, entries: list[Any]
) -> str:
    changed = _with_entry(entries, parts[key.count(".") + 1 :], value)
    text = "" if changed is None else json.dumps(changed, ensure_ascii=False, default=str)  # which is YAML, too
    whole = shlex.quote(f"{key}={text}") if 0 < len(text) <= _SHOWN_LIST else f"{key}=[...] with all entries"
    return (
        f"The override {printable(repr(override), 300)} names a part of {key}, which is a list of {len(entries)} "
        f"({tree.sources.get(key, 'set before')}). A list is set as a whole. Write {whole}, or change it in the file."
    )


def _with_entry(entries: list[Any], path: Sequence[str], value: Any) -> list[Any] | None:
    """A list with one value inside changed; None where the path does not lead to a place in it."""
    inside: Any = (changed := copy.deepcopy(entries))
    try:
        for part in path[:-1]:
            inside = inside[int(part) if isinstance(inside, list) else part]
        if isinstance(inside, list):
            inside[int(path[-1])] = value
        elif isinstance(inside, dict):
            inside[path[-1]] = value
        else:
            return None
    except (ValueError, LookupError, TypeError):
        return None
    return changed


def _read_tree(path: Path, chain: tuple[Path, ...]) -> ConfigTree:
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
        below = _read_tree(path.parent / entry, (*chain, resolved))
        tree.values = _merged(tree.values, below.values)
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
            continue  # an empty section ("eval:") says nothing, so it changes nothing
        if isinstance(value, Mapping):
            below = target.get(key)
            if not isinstance(below, dict):
                below = target[key] = {}
            sources.setdefault(dotted, source)
            _merge(below, value, sources, source, prefix=f"{dotted}.")
        else:
            target[key] = value
            sources[dotted] = source


def _merged(lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    _merge(lower, upper, {}, "", prefix="")
    return lower


def _first_line(error: yaml.YAMLError) -> str:
    return str(error).splitlines()[0]
