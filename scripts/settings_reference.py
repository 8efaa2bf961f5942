"""Write docs/settings.md from the settings classes: every key with its type, default, bounds and meaning.

python scripts/settings_reference.py            write the file
python scripts/settings_reference.py --check    exit with 1 if the file is out of date
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vlm_pg.config import RunConfig

TARGET = Path(__file__).resolve().parent.parent / "docs/settings.md"
INTRODUCTION = """# Settings

Every key of a run's configuration, generated from the code by `python scripts/settings_reference.py`. A key is written
`section.key=value` on the command line, or nested in YAML. An unknown key is rejected, with the nearest valid name."""


def page() -> str:
    lines = [INTRODUCTION]
    for name, field in RunConfig.model_fields.items():
        lines += ["", f"## {name}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += rows(name, settings_class(field.annotation))
    return "\n".join(lines) + "\n"


def rows(prefix: str, settings: type[BaseModel]) -> Iterator[str]:
    """A table row per field; nested settings follow the field that holds them."""
    for name, field in settings.model_fields.items():
        cells = (f"`{prefix}.{name}`", type_text(field), default_text(field), field.description or "")
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
        nested = settings_class(field.annotation)
        if nested is not None:
            yield from rows(f"{prefix}.{name}", nested)


def settings_class(annotation: Any) -> Any:
    """The settings class in ``annotation`` (``X`` or ``X | None``), else None."""
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def type_text(field: FieldInfo) -> str:
    bounds = [
        f"{symbol} {getattr(item, name):,}"
        for item in field.metadata
        for name, symbol in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return ", ".join([annotation_text(field.annotation), *bounds])


def annotation_text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return annotation_text(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if is_union(annotation):
        return " or ".join(annotation_text(argument) for argument in arguments)
    if annotation is type(None):
        return "null"
    if origin in (list, tuple, dict) or str(origin).startswith("<class 'collections.abc"):
        inner = ", ".join(annotation_text(argument) for argument in arguments if argument is not Ellipsis)
        return f"{'list' if origin in (list, tuple) else 'mapping'} of {inner}"
    if isinstance(annotation, type):
        return "mapping" if issubclass(annotation, BaseModel) else annotation.__name__
    return str(annotation)


def default_text(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value: Any = field.default_factory()  # type: ignore[call-arg]
        return "" if isinstance(value, BaseModel) else f"`{value}`" if value else "empty"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, BaseModel):
        return ""
    if isinstance(field.default, tuple | list):
        return f"`[{', '.join(map(str, field.default))}]`"
    return f"`{field.default}`" if field.default != "" else "empty"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(TARGET.read_text(encoding="utf-8") != page())
    TARGET.write_text(page(), encoding="utf-8")
