"""Protocols by name: bundled ones, and files of the user's own.

A bundled file has ``common``, what its variants share, and ``variants``. ``base`` of a variant, or of a file of one's
own, names one or several that it begins with. ``media`` and ``sampling`` are laid over each other key by key,
``differs_also`` is put behind what ``differs`` of the bases says; all else replaces what was there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vlm_pg.config_files import describe, read_tree
from vlm_pg.errors import ConfigError, printable
from vlm_pg.eval.protocols.protocol import Protocol

_SETS = Path(__file__).parent / "sets"
# Common beginnings of variants of several sets; no set of its own.
_SHARED = "shared"


@cache
def _variants() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The settings common to its file, and its own, of every bundled variant."""
    found = {}
    for path in sorted(_SETS.glob("*.yaml")):
        values = read_tree(path).values
        for variant, own in values["variants"].items():
            found[f"{path.stem}/{variant}"] = (values.get("common") or {}, own)
    return found


def protocol_names() -> list[str]:
    """SET/VARIANT of every bundled protocol, in order."""
    return [name for name in _variants() if not name.startswith(f"{_SHARED}/")]


def load_protocol(name: str) -> Protocol:
    """The bundled protocol SET/VARIANT, or that of a YAML file: ``load_protocol("video_mme/lmms")``.

    Args:
        name: a name, or a path that ends in .yaml or .yml.

    Raises:
        ConfigError: there is none of that name (the nearest are named), the file cannot be read, or its settings do not
            make a protocol.
    """
    if name.endswith((".yaml", ".yml")):
        path, shown = Path(name), printable(name, 300)
        values = dict(read_tree(path).values)
        if "variants" in values:
            raise ConfigError(
                f"{shown} has 'variants'. The settings of one protocol are expected. Write each variant into a file of "
                "its own."
            )
        return _protocol(_with_bases({}, values), path.stem, shown)
    if name not in protocol_names():
        raise ConfigError(_unknown(name))
    return _bundled(name)


@cache
def _bundled(name: str) -> Protocol:
    return _protocol(_with_bases(*_variants()[name]), name, f"the bundled protocol {name}")


def _protocol(values: Mapping[str, Any], name: str, source: str) -> Protocol:
    try:
        return Protocol.model_validate({"name": name, **values})
    except ValidationError as error:
        lines = describe(error, Protocol, {}, default_source=source)
        raise ConfigError(f"The protocol in {source} cannot be used:\n  " + "\n  ".join(lines)) from None


def _with_bases(common: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """The common settings, then those of each ``base``, then the variant's own."""
    own = dict(variant)
    bases = own.pop("base", [])
    merged = dict(common)
    for base in [bases] if isinstance(bases, str) else bases:
        if base not in _variants():
            raise ConfigError(f"'base' of a protocol cannot be used. {_unknown(str(base))}")
        merged = _merged(merged, _with_bases(*_variants()[base]))
    return _merged(merged, own)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    if isinstance(merged.get("differs_also"), str):
        merged["differs"] = f"{merged.get('differs', '')} {merged.pop('differs_also')}".strip()
    for key in ("media", "sampling"):
        if isinstance(below.get(key), Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = {**below[key], **above[key]}
    return merged


def _unknown(name: str) -> str:
    names = protocol_names()
    of_set = [one for one in names if one.partition("/")[0] == name.partition("/")[0]]
    near = difflib.get_close_matches(name, of_set or names, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]}? " if near else ""
    sets = dict.fromkeys(one.partition("/")[0] for one in names)
    advice += f"Of this set there are {', '.join(of_set)}." if of_set else f"Sets: {', '.join(sets)}."
    return (
        f"There is no protocol '{printable(name, 200)}'. SET/VARIANT of a bundled one, or a path that ends in .yaml, "
        f"is expected. {advice}"
    )
