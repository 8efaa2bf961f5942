"""Data sets from a hub, or from wherever else ``datasets`` loads them, as shards of Parquet in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import read_csv, read_rows
from vlm_pg.data.fields import Unreadable
from vlm_pg.data.files import RecordPlace, files_of
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing, write_bytes_atomic

_ROWS = 64  # that may hold media


def shard_of(split: str) -> str:
    """The name of the file that a split is fetched to."""
    return f"{split}-00000-of-00001.parquet"


def fetch(name: str, config: str | None, split: str, folder: Path, revision: str | None = None) -> Path:
    """Stream one split into ``folder`` as it is, media undecoded; a split that is there already is left as it is.

    Args:
        name: what ``datasets.load_dataset`` takes: OWNER/NAME, or a folder of data files.
        config: the configuration of a data set that has several.
        split: its name.
        folder: gets ``<split>-00000-of-00001.parquet``, whole or not at all, and hidden notes of where it is from and
            of rows of CSV that it has no room for (``rows_and_lost``).
        revision: a commit, branch or tag of a data set of the hub; None: the newest.

    Returns FOLDER:split, as ``vlm_pg.data.files`` reads it.

    Raises:
        ConfigError: there is no such data set or split, it cannot be loaded or written, or the folder holds another.
    """
    target, origin = folder / shard_of(split), Origin.of(name, config, revision)
    check_origin(target, origin)
    if not target.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            note_origin(target, origin)
            _write(name, config, split, target, revision)
        except ConfigError as error:  # of a file, with what to correct
            forget_origin(target)
            raise ConfigError(
                f"Split '{printable(split, 100)}' of data set '{printable(name, 200)}' is not fetched: "
                f"{printable(str(error), 600)} {_by_hand(name)}, correct that one, and give them with --train or "
                "--eval in the place of --hub."
            ) from error
        except Exception as error:  # whatever the package raises: the network, the name, or the data set are at fault
            forget_origin(target)
            raise ConfigError(
                f"Split '{printable(split, 100)}' of data set '{printable(name, 200)}' (configuration "
                f"{config or 'default'}) cannot be fetched: {printable(str(error), 500)}. A data set that the package "
                "'datasets' loads is expected. Correct --hub, --hub-config or --hub-splits. Or: "
                f"{_by_hand(name)} and give them with --train or --eval in the place of --hub."
            ) from error
    return folder.parent / f"{folder.name}:{split}"


def _write(name: str, config: str | None, split: str, target: Path, revision: str | None) -> None:
    import datasets
    import pyarrow.parquet
    from datasets.table import embed_table_storage

    builder = datasets.load_dataset_builder(name, config, revision=revision)
    if holds_csv(builder):
        _write_csv(builder, split, target)
        return
    stream = builder.as_streaming_dataset(split=split)
    if stream.features is None:
        stream = stream._resolve_features()
    schema = stream.features.arrow_schema  # its metadata say which columns are images and videos
    with replacing(target) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in stream.with_format("arrow").iter(batch_size=_ROWS):
            table = embed_table_storage(batch.cast(schema))  # media that the data set keeps in files of its own
            writer.write_table(table.cast(schema))


def _write_csv(builder: Any, split: str, target: Path) -> None:
    import pyarrow.parquet

    # What the shard lacks is written before it is there.
    with replacing(target) as file, lost_beside(target) as lost:
        tables = csv_tables(builder, split, _ROWS, lost)
        first = next(tables, None)
        if first is None:
            raise ValueError(f"it has no rows{' that can be read: ' if lost.first else ''}{lost.first}")
        with pyarrow.parquet.ParquetWriter(file, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)


def _by_hand(name: str) -> str:
    if Path(name).is_dir():
        return f"Take its files from '{printable(name, 200)}'"
    return f"Download its files (hf download {printable(name, 200)} --repo-type dataset --local-dir FOLDER)"


# What a data set may say of its files without changing how they are read.
_ANY = ("name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter")


def holds_csv(builder: Any) -> bool:
    """Whether a builder of ``datasets`` reads CSV."""
    from datasets.packaged_modules.csv.csv import CsvConfig

    return isinstance(builder.config, CsvConfig)


def csv_tables(builder: Any, split: str, rows: int, lost: LostRows) -> Iterator[Any]:
    """Arrow tables of so many rows each: texts, or what the data set's features say the columns are.

    Args:
        builder: of ``datasets``.
        split: its name.
        rows: see above.
        lost: gets the rows of more or fewer cells than there are columns.

    Raises:
        ValueError: there is no such split, or its files are of another dialect than RFC 4180's.
        ConfigError: a file cannot be read.
    """
    import datasets
    import pyarrow
    from datasets.table import cast_table_to_features

    config, files = builder.config, {str(name): list(found) for name, found in builder.config.data_files.items()}
    if split not in files:
        raise ValueError(f"it has the splits {', '.join(files)}")
    usual = type(config)()
    odd = [name for name, value in vars(usual).items() if name not in _ANY and getattr(config, name) != value]
    if odd:
        raise ValueError(f"its CSV files are to be read with {', '.join(odd)}, which is not known here")
    features, columns = builder.info.features or config.features, list[str]()
    paths = datasets.DownloadManager().download_and_extract(files[split])
    for name, path in (
        (str(file).rpartition("/")[2], Path(found)) for file, found in zip(files[split], paths, strict=True)
    ):
        read = _csv_rows(path, name, config.sep, lost)
        while some := list(islice(read, rows)):
            columns = columns or list(some[0])
            if features is None:
                features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
            if list(some[0]) != columns or set(columns) != set(features):
                raise ValueError(f"'{name}' has the columns {', '.join(some[0])}, not {', '.join(features)}")
            texts = {one for one, feature in features.items() if feature == datasets.Value("string")}
            cells = {one: [row[one] if row[one] or one in texts else None for row in some] for one in features}
            table = pyarrow.table(cells, pyarrow.schema([(one, pyarrow.string()) for one in features]))
            yield cast_table_to_features(table, features)


def _csv_rows(path: Path, name: str, delimiter: str, lost: LostRows) -> Iterator[dict[str, str]]:
    for place, row in read_csv(path, delimiter):
        if isinstance(row, Unreadable):
            lost.add(name, place.line, row)
        else:
            yield row


_LOST_ENDING = ".lost.jsonl"
LOST = (f".*.parquet{_LOST_ENDING}",)  # in the shard's folder


class LostRows:
    """Those of one shard, written as they come. ``count``: how many; ``first``: the first, for messages."""

    def __init__(self, file: Any):
        self._file = file
        self.count, self.first = 0, ""

    def add(self, name: str, line: int, row: Unreadable) -> None:
        """A row that ends on this line of the file ``name`` of the data set."""
        self.count += 1
        self.first = self.first or f"'{printable(name, 200)}:{line}' is {row.what}"
        told = {"file": name, "line": line, "what": row.what, "reason": row.reason}
        self._file.write((json.dumps(told) + "\n").encode())


@contextmanager
def lost_beside(shard: Path) -> Iterator[LostRows]:
    """Collects the rows that a shard lacks, in the place of those of an earlier one of this name."""
    with replacing(_lost_file(shard)) as file:
        yield (lost := LostRows(file))
    if not lost.count:
        _lost_file(shard).unlink()


def how_many_lost(shard: Path) -> int:
    """How many rows a shard lacks."""
    return sum(1 for _ in _read_lost(shard))


def rows_and_lost(path: Path) -> Iterator[tuple[RecordPlace, Any]]:
    """As ``read_rows``, with the rows that shards lack behind the others."""
    number = 0
    for place, row in read_rows(path):
        number += 1
        yield place, row
    for shard in files_of(path):
        for told in _read_lost(shard):
            number += 1
            place = RecordPlace(told["line"], file=told["file"], row=number)
            yield place, Unreadable(told["what"], told["reason"])


def _lost_file(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{_LOST_ENDING}")


def _read_lost(shard: Path) -> Iterator[dict[str, Any]]:
    path = _lost_file(shard)
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                told = json.loads(line)
                yield {"file": str(told["file"]), "line": int(told["line"]), "what": str(told["what"]),
                       "reason": str(told["reason"])}  # fmt: skip
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"'{printable(str(path), 300)}' cannot be read: {printable(str(error), 200)}. What 'vlm-pg prepare "
                    "generic --hub' wrote is expected. Remove the folder, and fetch the data set again."
                ) from error


_ORIGIN_ENDING = ".fetched"


class UnknownOrigin(ConfigError):
    """A shard is there, and nothing tells what it was fetched from: other versions of this program left no notes."""


@dataclass(frozen=True)
class Origin:
    """A data set as it was asked for.

    Args:
        name: OWNER/NAME, or the whole path of a folder.
        config: its configuration; None: the only one.
        revision: a commit, branch or tag; None: the newest at that time.
    """

    name: str
    config: str | None
    revision: str | None

    @classmethod
    def of(cls, name: str, config: str | None, revision: str | None) -> Origin:
        """Of the arguments that ``datasets.load_dataset`` takes."""
        return cls(str(Path(name).resolve()) if Path(name).is_dir() else name, config, revision)

    def __str__(self) -> str:
        said = f"'{printable(self.name, 200)}', configuration {self.config or 'default'}"
        return f"{said}, revision {self.revision}" if self.revision else said


def check_origin(shard: Path, origin: Origin) -> None:
    """Refuse a folder that has shards of another data set, or this one from nobody knows where.

    Raises:
        UnknownOrigin: it is not known where the shard is from.
        ConfigError: one of them is of another data set.
    """
    advice = "A folder holds what was fetched of one data set. Choose another --hub-folder, or remove that file"
    for note in sorted(shard.parent.glob(f".*{_ORIGIN_ENDING}")):
        fetched = note.with_name(note.name[1 : -len(_ORIGIN_ENDING)])
        before = _read_origin(note)
        if fetched.is_file() and before != origin:
            raise ConfigError(
                f"'{printable(str(fetched), 300)}' was fetched from {before or 'another place'}; asked for is "
                f"{origin}. {advice}."
            )
    if shard.is_file() and not _origin_file(shard).is_file():
        raise UnknownOrigin(
            f"'{printable(str(shard), 300)}' is there, and it is not known from where: an earlier version may have "
            f"fetched it. Asked for is {origin}. If that is what it holds, give the folder in the place of --hub; "
            "else choose another --hub-folder, or remove that file."
        )


def note_origin(shard: Path, origin: Origin) -> None:
    """Say where a shard is from, before it is written."""
    write_bytes_atomic(_origin_file(shard), (json.dumps(asdict(origin)) + "\n").encode(errors="backslashreplace"))


def forget_origin(shard: Path) -> None:
    """It could not be fetched."""
    _origin_file(shard).unlink(missing_ok=True)


def _origin_file(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{_ORIGIN_ENDING}")


def _read_origin(note: Path) -> Origin | None:
    try:
        return Origin(**json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
