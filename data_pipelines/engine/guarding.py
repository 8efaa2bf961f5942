"""The folder that is written holds nothing that is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vlm_pg.errors import ConfigError, printable


def refuse_inside(out: Path, paths: Iterable[Path]) -> None:
    """Refuse an output folder in which something lies that is read: it would be replaced, or read as what was prepared.

    Raises:
        ConfigError: one of the paths lies in the folder or is it, as it is written or once links are resolved.
    """
    real = out.resolve()
    for path in paths:
        # A link in the folder is in the way as much as a file that a link outside of it leads to.
        if any(one.is_relative_to(real) for one in (path.resolve(), path.parent.resolve() / path.name)):
            raise ConfigError(
                f"'{printable(str(path), 300)}' is read, and lies in --out '{printable(str(out), 300)}'. A folder of "
                "its own is expected, which holds the prepared set alone: files in it are replaced. Choose another."
            )
