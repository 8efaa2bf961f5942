"""Which program prepares: a digest of the sources that decide about what is written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import data_pipelines
import vlm_pg.data

# All rooms of vlm_pg that pipelines ask: records, media, and rewards, which gold answers must earn.
_ROOMS = ("data", "media", "rewards")


@cache
def program() -> str:
    """SHA-256 of the sources of the pipelines and of what they ask: another one may prepare otherwise."""
    home = Path(str(vlm_pg.data.__file__)).parent.parent
    rooms = {f"vlm_pg.{name}": home / name for name in _ROOMS}
    return digest_of({"data_pipelines": Path(str(data_pipelines.__file__)).parent, **rooms})


def digest_of(packages: Mapping[str, Path]) -> str:
    """SHA-256 of all Python files below some folders, with their names there, wherever the folders lie."""
    digest = hashlib.sha256()
    for name, folder in sorted(packages.items()):
        for path in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}/{path.relative_to(folder).as_posix()} {content}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
