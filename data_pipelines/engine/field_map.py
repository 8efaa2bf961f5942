"""A map of fields: which fields of a data set's rows make the fields of a record. Read from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from data_pipelines.engine.dataset import TABLES, Split
from vlm_pg.config_files import nearest_keys, read_tree
from vlm_pg.data.gold import answer_kind_of
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.settings import Settings
from vlm_pg.types import MediaKind

# What only videos have.
VIDEO_PARTS = ("start", "end", "times", "subtitles", "folder_fps")
GivenAs = Literal["written", "tagged", "letter", "index", "index from 1", "text"]


class Source(Settings):
    """Where a value comes from: a field of the row, or one constant for all rows. A text alone names the field.

    Fields inside others are named with points: "metadata.task", "conversations.0.value".
    """

    field: str | None = Field(None, min_length=1, description="Field of the row.")
    constant: Any = Field(None, description="The value for all rows.")

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"field": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        values = {name: getattr(self, name) for name in self._sources()}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError(f"has {given or 'no source'}; give one of {', '.join(self._sources())}")
        return self

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("field", "constant")

    def fields(self) -> tuple[str, ...]:
        """The row's fields that it reads."""
        return () if self.field is None else (self.field,)


class Value(Source):
    """A value, after these conversions in this order."""

    names: dict[str, str] | None = Field(
        None, description="What each value of the field is called in a record; rows with another value are refused."
    )
    remove: list[str] = Field(
        default_factory=list, description="Exact sentences that are taken away at the start and the end of the text."
    )
    prefix: str = Field("", description="Put before the text, or before each of a list.")
    suffix: str = Field("", description="Put behind it.")

    @field_validator("names", mode="before")
    @classmethod
    def _keys_as_text(cls, value: Any) -> Any:
        """YAML reads some keys as true, false and numbers."""
        return {name_of(key): name for key, name in value.items()} if isinstance(value, dict) else value


class Options(Source):
    """The options of a question."""

    columns: list[str] | None = Field(None, min_length=2, description="Fields of the row that hold one option each.")
    in_question: bool = Field(False, description="They are the last lines of the question: 'A. red'.")
    separator: str | None = Field(None, min_length=1, description="What stands between them where they are one text.")

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("field", "constant", "columns", "in_question")

    def fields(self) -> tuple[str, ...]:
        return (*super().fields(), *(self.columns or ()))


class Answer(Source):
    """The right answer."""

    given_as: GivenAs = Field(
        "written",
        description="How it names an option, in questions with options: letter, index (from 0), index from 1, text, or "
        "written: any spelling that only one option fits. tagged: between <answer> and </answer>.",
    )
    separator: str = Field(",", min_length=1, description="What stands between several right options in one text.")


class Fields(Settings):
    """The fields of a record, as the docstring of ``vlm_pg.data.records`` describes them."""

    problem_id: Value | None = Field(None, description="Without it rows are called by their file and line.")
    problem: Value
    data_type: Value | None = None
    problem_type: Value = Field(description="How the answer is checked.")
    options: Options | None = None
    answer: Answer
    process: Value | None = None
    path: Value | None = None
    video: Value | None = Field(None, description="Paths of videos, in the place of path and data_type; image alike.")
    image: Value | None = None
    data_source: Value | None = None
    category: Value | None = None
    start: Value | None = None
    end: Value | None = None
    times: Value | None = None
    subtitles: Value | None = None
    folder_fps: Value | None = None

    @field_validator("problem_type")
    @classmethod
    def _known_kinds(cls, value: Value) -> Value:
        for kind in [value.constant] if value.field is None else (value.names or {}).values():
            try:
                answer_kind_of({"problem_type": kind})
            except SampleError as fault:
                raise ValueError(str(fault)) from None
        return value

    @model_validator(mode="after")
    def _one_way_to_media(self) -> Self:
        if self.media() and (self.path or self.data_type):
            raise ValueError("has video or image beside path or data_type; give video and image, or path and data_type")
        if not self.media() and self.data_type is None:
            raise ValueError("has no data_type; give it, or video and image for the paths of each")
        return self

    def media(self) -> dict[MediaKind, Value]:
        """Where paths come from, by kind, if each kind has fields of its own."""
        given: dict[MediaKind, Value | None] = {"video": self.video, "image": self.image}
        return {kind: source for kind, source in given.items() if source is not None}

    def sources(self) -> dict[str, Value]:
        """Those that are one value of the record each, by name."""
        names = type(self).model_fields.keys() - self.media().keys()
        given = {name: getattr(self, name) for name in type(self).model_fields if name in names}
        return {name: source for name, source in given.items() if isinstance(source, Value)}

    def optional(self) -> set[str]:
        """The sources that some rows may lack: an image has no start, a text no path."""
        if self.data_type is not None and self.data_type.field is None:
            return set()
        return set(VIDEO_PARTS) if self.media() else {"path", *VIDEO_PARTS}


class FieldMap(Settings):
    """One data set."""

    name: str = Field(pattern=r"^[\w.-]{1,80}$", description="Of the data set, and of records without data_source.")
    fields: Fields
    files: dict[Split, list[str]] = Field(
        default_factory=lambda: _usual_files(),
        description="Glob patterns below the folder of the data set; FOLDER:split for shards of Parquet.",
    )
    media_folders: list[str] = Field(
        default_factory=list, description="Glob patterns below the media root that paths of rows start from."
    )
    keyed_by: str | None = Field(None, description="The file is one object of rows: the field their names become.")
    file_is_row: bool = Field(False, description="Each file is one object, which is one row.")
    questions: str | None = Field(
        None, description="The row's list of questions. Each is read as a row of its own with the row's other fields."
    )


def _usual_files() -> dict[Split, list[str]]:
    names: dict[Split, str] = {"train": "train", "eval": "test"}
    return {split: [f".:{name}", *(f"{name}{ending}" for ending in TABLES)] for split, name in names.items()}


def read_map(path: Path) -> FieldMap:
    """The map in a YAML file.

    Raises:
        ConfigError: it cannot be read, has unknown keys (with the nearest known), or names an unknown answer kind.
    """
    try:
        return FieldMap.model_validate(read_tree(path).values)
    except ValidationError as error:
        lines = "\n  ".join(_described(dict(details)) for details in error.errors())
        raise ConfigError(f"The map of fields {printable(str(path), 300)} cannot be used:\n  {lines}") from None


def name_of(value: Any) -> str:
    """A value as ``Value.names`` calls it: name_of(True) == "true", name_of(2.0) == "2"."""
    if isinstance(value, bool) or value in ("True", "False"):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _described(details: dict[str, Any]) -> str:
    key = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        near = nearest_keys(key, FieldMap)
        return f"{key} is not a known key. {f'Did you mean {near[0]}?' if near else 'Remove it.'}"
    if details["type"] == "missing":
        return f"{key} is missing. Add it."
    message = details["msg"].removeprefix("Value error, ")
    return f"{key} is {printable(repr(details['input']), 80)}: {message[:1].lower() + message[1:]}. Correct it."
