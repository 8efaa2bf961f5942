"""CSV files of a data set that ``datasets`` loads, read by this program's own reader.

The package reads them by pandas: "None" and "NA" are no texts there, 007 is 7, and cells that a row has too many or too
few of move the others or are made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.engine.reading import read_csv
from vlm_pg.data.unreadable import Unreadable

# What a data set may say of its files without changing how they are read.
_ANY = ("name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter")


def holds_csv(builder: Any) -> bool:
    """Whether a builder of ``datasets`` reads CSV."""
    from datasets.packaged_modules.csv.csv import CsvConfig

    return isinstance(builder.config, CsvConfig)


def csv_tables(builder: Any, split: str, rows: int) -> Iterator[Any]:
    """Arrow tables of so many rows each: texts, or what the data set's features say the columns are.

    Raises:
        ConfigError, ValueError: there is no such split, its files are of another dialect than RFC 4180's, or one has a
            row that cannot be read.
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
    features, names = builder.info.features or config.features, None
    for path in map(Path, datasets.DownloadManager().download_and_extract(files[split])):
        read = _rows(path, config.sep)
        while some := list(islice(read, rows)):
            names = names or list(some[0])
            if features is None:
                features = datasets.Features({name: datasets.Value("string") for name in names})
            if list(some[0]) != names or set(names) != set(features):
                raise ValueError(f"'{path.name}' has the columns {', '.join(some[0])}, not {', '.join(features)}")
            texts = {name for name, feature in features.items() if feature == datasets.Value("string")}
            cells = {name: [row[name] if row[name] or name in texts else None for row in some] for name in features}
            table = pyarrow.table(cells, pyarrow.schema([(name, pyarrow.string()) for name in features]))
            yield cast_table_to_features(table, features)


def _rows(path: Path, delimiter: str) -> Iterator[dict[str, str]]:
    for place, row in read_csv(path, delimiter):
        if isinstance(row, Unreadable):
            raise ValueError(f"'{path.name}:{place}' is {row.what}")
        yield row
