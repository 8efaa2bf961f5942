"""Data sets from a hub, or from wherever else ``datasets`` loads them, as shards of Parquet in a folder."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from data_pipelines.engine.hub_csv import csv_tables, holds_csv
from data_pipelines.engine.hub_lost import lost_beside
from data_pipelines.engine.hub_origin import Origin, check_origin, forget_origin, note_origin
from vlm_pg.errors import ConfigError, printable
from vlm_pg.files import replacing

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
