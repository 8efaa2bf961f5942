"""CSV files of a data set that ``datasets`` loads, read by this program's own reader.

The package reads them by pandas: "None" and "NA" are no texts there, 007 is 7, and cells that a row has too many or too
few of move the others or are made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.hub_lost import LostRows
from data_pipelines.engine.reading import read_csv
from vlm_pg.data.fields import Unreadable

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
        read = _rows(path, name, config.sep, lost)
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


def _rows(path: Path, name: str, delimiter: str, lost: LostRows) -> Iterator[dict[str, str]]:
    for place, row in read_csv(path, delimiter):
        if isinstance(row, Unreadable):
            lost.add(name, place.line, row)
        else:
            yield row
