"""Prepared sets: Parquet shards of checked records, which training, evaluation and ``datasets`` read.

    data/star/manifest.json
    data/star/train-00000-of-00002.parquet
    data/star/eval-00000-of-00001.parquet
    data/star/refused.jsonl

A row is a record (``vlm_pg.data.records``) with one type a column: fields of media are lists with an entry for each
medium. Every shard has the schema's version, and readers refuse files that are not as the manifest says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vlm_pg.data.fields import WRITTEN_NAMES, written_details
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.types import Sample

MANIFEST = "manifest.json"
# Manifests have some hundred bytes for a file of fifty thousand records.
_MOST_BYTES = 64 << 20
# 2: with ``details``. 3: with ``folder_fps``. 4: with ``turns`` and ``rejected``.
SCHEMA_VERSION = 4
_READABLE_VERSIONS = (1, 2, 3, 4)
_VERSION_KEY = b"vlm_pg.prepared"
# Tools that join, cut or change tables keep the version, and maybe this: with another number of rows it is no shard.
_ROWS_KEY = b"vlm_pg.rows"
SHARD_ROWS = 50_000
# Random access reads a whole row group, and checksums cover groups.
GROUP_ROWS = 256


@cache
def schema() -> Any:
    """The Arrow schema of a shard, with ``datasets``' description of the columns."""
    from datasets import Features, List, Value

    text, seconds = Value("string"), Value("float64")
    features = Features(
        {
            "problem_id": text,
            "problem": text,
            "data_type": List(text),
            "problem_type": text,
            "options": List(text),
            "process": text,
            "solution": text,
            "turns": List(text),
            "rejected": text,
            "path": List(text),
            "data_source": text,
            "category": text,
            "details": text,
            "start": List(seconds),
            "end": List(seconds),
            "times": List(List(seconds)),
            "subtitles": List(text),
            "folder_fps": List(seconds),
        }
    )
    version = json.dumps({"schema_version": SCHEMA_VERSION}).encode()
    return features.arrow_schema.with_metadata({**(features.arrow_schema.metadata or {}), _VERSION_KEY: version})


def to_row(sample: Sample) -> dict[str, Any]:
    """A sample as a row of a shard; ``parse_record`` reads it back equal.

    Raises:
        SampleError: ``not_unicode``: a path that is not UTF-8, which Parquet cannot hold.
    """
    for path in (text for ref in sample.media for text in (ref.path, ref.subtitles)):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise SampleError(
                "not_unicode",
                f"the path '{printable(path, 200)}' is not UTF-8. Parquet holds UTF-8 alone. Rename the file, or "
                "prepare with --format jsonl.",
            ) from None
    return {
        "problem_id": sample.sample_id,
        "problem": sample.question,
        "data_type": [ref.kind for ref in sample.media],
        "problem_type": WRITTEN_NAMES[sample.answer_kind],
        "options": list(sample.options),
        "process": sample.process,
        "solution": f"<answer>{sample.answer}</answer>" if sample.answer else "",
        "turns": list(sample.turns),
        "rejected": sample.rejected,
        "path": [ref.path for ref in sample.media],
        "data_source": sample.source,
        "category": sample.category,
        "details": written_details(sample.details),
        "times": [list(ref.times) for ref in sample.media],
        **{name: [getattr(ref, name) for ref in sample.media] for name in ("start", "end", "subtitles", "folder_fps")},
    }


class ShardWriter:
    """Writes one split as shards of at most ``SHARD_ROWS`` rows; the same rows give the same bytes.

    Args:
        folder: where they are written; files of the same names are replaced.
        split: "train" or "eval".
    """

    def __init__(self, folder: Path, split: str):
        self._rows = 0
        self._folder, self._split = folder, split
        self._waiting: list[dict[str, Any]] = []
        self._writer: Any = None
        self._written: list[Path] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append a row (``to_row``)."""
        self._waiting.append(row)
        self._rows += 1
        if len(self._waiting) == GROUP_ROWS:
            self._flush()
        if self._rows % SHARD_ROWS == 0:
            self._end_shard()

    def close(self) -> dict[str, int]:
        """Write the rest and give the shards their names, which contain their number. At least one is written.

        Returns:
            Number of rows by name.
        """
        if not self._written:
            self._open()
        self._end_shard()
        files, count = {}, len(self._written)
        for number, path in enumerate(self._written):
            name = f"{self._split}-{number:05d}-of-{count:05d}.parquet"
            path.replace(self._folder / name)
            files[name] = min(SHARD_ROWS, self._rows - number * SHARD_ROWS)
        return files

    def _flush(self) -> None:
        import pyarrow

        if not self._waiting:
            return
        if self._writer is None:
            self._open()
        self._writer.write_table(pyarrow.Table.from_pylist(self._waiting, schema()), row_group_size=GROUP_ROWS)
        self._waiting = []

    def _open(self) -> None:
        import pyarrow.parquet

        self._written.append(self._folder / f".{self._split}-{len(self._written):05d}.parquet.tmp")
        self._writer = pyarrow.parquet.ParquetWriter(
            self._written[-1], schema(), compression="zstd", write_page_checksum=True
        )

    def _end_shard(self) -> None:
        self._flush()
        if self._writer is not None:
            rows = (self._rows - 1) % SHARD_ROWS + 1 if self._rows else 0
            self._writer.add_key_value_metadata({_ROWS_KEY: str(rows)})
            self._writer.close()
            self._writer = None


def is_shard(path: Path) -> bool:
    """Whether a Parquet file is an unchanged shard of a prepared set."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except Exception:  # damaged: reading it raises the error
        return False
    written = metadata.metadata or {}
    return _VERSION_KEY in written and written.get(_ROWS_KEY) == str(metadata.num_rows).encode()


def check_version(path: Path, metadata: Mapping[bytes, bytes] | None) -> None:
    """Refuse a shard that a later version of this program wrote; files without a version are no shards.

    Raises:
        ConfigError: the version is not known.
    """
    written = (metadata or {}).get(_VERSION_KEY)
    if written is None:
        return
    try:
        version = json.loads(written)["schema_version"]
    except (ValueError, KeyError, TypeError):
        version = None
    if version not in _READABLE_VERSIONS:
        raise ConfigError(
            f"Data file '{printable(str(path), 300)}' has records of schema version {printable(str(version), 50)}. "
            f"This program reads versions {', '.join(map(str, _READABLE_VERSIONS))}. Update vlm_pg, or prepare the "
            "data set again."
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where there is none, or another file of that name."""
    path = folder / MANIFEST
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a pipe would never end
            return None
        written = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(written, dict) or not isinstance(written.get("fingerprint"), str):
        return None
    return written if all(isinstance(written.get(name), dict) for name in ("arguments", "files")) else None


def sizes_of(manifest: dict[str, Any]) -> dict[str, int]:
    """Sizes in bytes by file name, as far as a manifest has them."""
    written = manifest.get("written")
    entries = written.items() if isinstance(written, dict) else ()
    return {name: one["bytes"] for name, one in entries if isinstance(one, dict) and isinstance(one.get("bytes"), int)}


def check_sizes(files: Iterable[Path]) -> None:
    """Refuse files of another size than in the manifest beside them; files that it does not list are accepted.

    Raises:
        ConfigError: a file is not as it was written.
    """
    sizes: dict[Path, dict[str, int]] = {}
    for file in files:
        folder = file.parent
        if folder not in sizes:
            sizes[folder] = sizes_of(read_manifest(folder) or {})
        expected = sizes[folder].get(file.name)
        if expected is not None and file.is_file() and (actual := file.stat().st_size) != expected:
            raise ConfigError(
                f"Data file '{printable(str(file), 300)}' has {actual:,} bytes; it had {expected:,} when it was "
                f"prepared, as the {MANIFEST} beside it says. It is read as it was written. Prepare the data set again "
                "with --overwrite; a file that you changed yourself goes into a folder of its own."
            )
