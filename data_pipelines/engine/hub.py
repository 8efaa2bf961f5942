"""Data sets from a hub, or from wherever else ``datasets`` loads them, as shards of Parquet in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.dataset import read_csv
from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing, write_bytes_atomic

_ROWS = 64  # that may hold media
# Settings of a CSV data set that do not change how its files are parsed.
_CSV_SETTINGS = ("name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter")
_ORIGIN = ".fetched"  # ending of a hidden note beside a shard


@dataclass(frozen=True)
class Origin:
    """A data set as it was requested.

    Args:
        name: OWNER/NAME, or the absolute path of a folder.
        config: its configuration; None: the only one.
        revision: a commit, branch or tag; None: the newest at that time.
    """

    name: str
    config: str | None
    revision: str | None

    def __str__(self) -> str:
        shown = f"'{printable(self.name, 200)}', configuration {self.config or 'default'}"
        return f"{shown}, revision {self.revision}" if self.revision else shown


def shard_of(split: str) -> str:
    """The file name of a fetched split."""
    return f"{split}-00000-of-00001.parquet"


def fetch(name: str, config: str | None, split: str, folder: Path, revision: str | None = None) -> Path:
    """Stream one split into ``folder``, media undecoded; a split that exists is kept.

    Args:
        name: as ``datasets.load_dataset`` takes it: OWNER/NAME, or a folder of data files.
        config: the configuration of a data set that has several.
        split: its name.
        folder: gets ``<split>-00000-of-00001.parquet``, whole or not at all, and a hidden note of its origin.
        revision: a commit, branch or tag of a data set of the hub; None: the newest.

    Returns FOLDER:split, as ``vlm_pg.data.files`` reads it.

    Raises ConfigError: there is no such data set or split, it cannot be loaded or written, or the folder holds another.
    """
    target = folder / shard_of(split)
    origin = Origin(str(Path(name).resolve()) if Path(name).is_dir() else name, config, revision)
    check_origin(target, origin)
    if not target.is_file():
        by_hand = (
            f"Take its files from '{printable(name, 200)}'"
            if Path(name).is_dir()
            else f"Download its files (hf download {printable(name, 200)} --repo-type dataset --local-dir FOLDER)"
        )
        note = _note(target)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(note, (json.dumps(asdict(origin)) + "\n").encode(errors="backslashreplace"))
            _write(name, config, split, target, revision)
        except ConfigError as error:  # of a file, with what to correct
            note.unlink(missing_ok=True)
            raise ConfigError(
                f"Split '{printable(split, 100)}' of data set '{printable(name, 200)}' is not fetched: "
                f"{printable(str(error), 600)} {by_hand}, correct that one, and give them with --train or "
                "--eval instead of --hub."
            ) from error
        except Exception as error:  # whatever the package raises: the network, the name, or the data set are at fault
            note.unlink(missing_ok=True)
            raise ConfigError(
                f"Split '{printable(split, 100)}' of data set '{printable(name, 200)}' (configuration "
                f"{config or 'default'}) cannot be fetched: {printable(str(error), 500)}. A data set that the package "
                "'datasets' loads is expected. Correct --hub, --hub-config or --hub-splits. Or: "
                f"{by_hand} and give them with --train or --eval instead of --hub."
            ) from error
    return folder.parent / f"{folder.name}:{split}"


def _write(name: str, config: str | None, split: str, target: Path, revision: str | None) -> None:
    import datasets
    import pyarrow.parquet
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.table import embed_table_storage

    builder = datasets.load_dataset_builder(name, config, revision=revision)
    if isinstance(builder.config, CsvConfig):
        tables = _csv_tables(builder, split)
        first = next(tables, None)
        if first is None:
            raise ValueError("it has no rows")
        with replacing(target) as file, pyarrow.parquet.ParquetWriter(file, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        return
    stream = builder.as_streaming_dataset(split=split)
    if stream.features is None:
        stream = stream._resolve_features()
    schema = stream.features.arrow_schema  # its metadata mark the columns of images and videos
    with replacing(target) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in stream.with_format("arrow").iter(batch_size=_ROWS):
            table = embed_table_storage(batch.cast(schema))  # media that the data set keeps in files of its own
            writer.write_table(table.cast(schema))


def _csv_tables(builder: Any, split: str) -> Iterator[Any]:
    """Arrow tables of up to ``_ROWS`` rows of text, or of the types in the data set's features.

    ``datasets`` reads CSV with pandas: "None" and "NA" become missing values, 007 becomes 7, and in rows with too many
    or too few cells values are shifted or made up. So they are read by ``read_csv``.

    Args:
        builder: of ``datasets``.

    Raises:
        ValueError: there is no such split, or its files are of another dialect than RFC 4180's.
        ConfigError: a file cannot be read, or a row has more or fewer cells than columns.
    """
    import datasets
    import pyarrow
    from datasets.table import cast_table_to_features

    config, files = builder.config, {str(name): list(found) for name, found in builder.config.data_files.items()}
    if split not in files:
        raise ValueError(f"it has the splits {', '.join(files)}")
    usual = vars(type(config)())
    odd = [name for name in usual if name not in _CSV_SETTINGS and getattr(config, name) != usual[name]]
    if odd:
        raise ValueError(f"its CSV files are to be read with {', '.join(odd)}, which is not known here")
    features, columns = builder.info.features or config.features, list[str]()
    paths = datasets.DownloadManager().download_and_extract(files[split])
    for file, path in zip(files[split], paths, strict=True):
        name = str(file).rpartition("/")[2]
        rows = _whole_rows(Path(path), name, config.sep)
        while some := list(islice(rows, _ROWS)):
            columns = columns or list(some[0])
            if features is None:
                features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
            if list(some[0]) != columns or set(columns) != set(features):
                raise ValueError(f"'{name}' has the columns {', '.join(some[0])}, not {', '.join(features)}")
            texts = {one for one, feature in features.items() if feature == datasets.Value("string")}
            cells = {one: [row[one] if row[one] or one in texts else None for row in some] for one in features}
            table = pyarrow.table(cells, pyarrow.schema([(one, pyarrow.string()) for one in features]))
            yield cast_table_to_features(table, features)


def _whole_rows(path: Path, name: str, delimiter: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, which the data set calls ``name``."""
    for location, row in read_csv(path, delimiter):
        if isinstance(row, Unreadable):
            raise ConfigError(
                f"'{printable(name, 200)}:{location.line}' is {row.what}. As many cells as columns are expected: of a "
                "file given with --train such a row alone is refused."
            )
        yield row


def check_origin(shard: Path, origin: Origin) -> None:
    """Refuse a folder with shards of another data set, and a shard without a note of its origin. Raises ConfigError."""
    for note in sorted({_note(shard), *shard.parent.glob(f".*{_ORIGIN}")}):
        fetched = note.with_name(note.name[1 : -len(_ORIGIN)])
        before = None
        with suppress(OSError, ValueError, TypeError):
            before = Origin(**json.loads(note.read_bytes()))
        if fetched.is_file() and before != origin:
            raise ConfigError(
                f"'{printable(str(fetched), 300)}' was fetched from {before or 'an unknown place'}; requested is "
                f"{origin}. A folder holds what was fetched of one data set. Choose another --hub-folder, or remove "
                "that file; or, if it is what you want, give the folder instead of --hub."
            )


def _note(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}{_ORIGIN}")
