"""``vlm-pg prepare``: find and run the data pipelines, which this package never imports by itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from vlm_pg.errors import ConfigError

PACKAGE = "data_pipelines"


def prepare(name: str | None, argv: Sequence[str]) -> int:
    """Run the pipeline ``name`` with its own arguments; without a name print what there is. Returns the exit code.

    Raises:
        ConfigError: there is no such pipeline.
    """
    pipelines = find_pipelines()
    if name is None:
        width = max(map(len, pipelines), default=0)
        print("Data sets (vlm-pg prepare NAME --help tells how one is published, an example record and the arguments):")
        for known, description in pipelines.items():
            print(f"  {known:{width}}  {description.partition(chr(10))[0]}")
            if licence := paragraph(description, "Licence:"):
                print(f"  {'':{width}}  Licence: {licence}")
        return 0
    module_name = name.replace("-", "_")
    if module_name not in pipelines:
        raise ConfigError(
            f"There is no data set {name!r}. Known are {', '.join(pipelines) or 'none'}. "
            "Run vlm-pg prepare to see them with a line each."
        )
    module = importlib.import_module(f"{PACKAGE}.{module_name}")
    return int(module.main(list(argv)) or 0)


def paragraph(description: str, opening: str) -> str:
    """The paragraph of a pipeline's docstring that begins so, on one line, without its opening; "" without one."""
    for one in description.split("\n\n"):
        if one.startswith(opening):
            return " ".join(one.removeprefix(opening).split())
    return ""


def find_pipelines() -> dict[str, str]:
    """Name -> docstring, of every module of ``data_pipelines`` that has a ``main``.

    The files are parsed, not imported: listing must stay fast.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ConfigError(
            f"The package {PACKAGE} is not installed. It comes with this repository. "
            "Install from a checkout: bash scripts/train_video.sh does, or pip install -e ."
        )
    pipelines = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any("main" in _defined(node) for node in tree.body):
            pipelines[path.stem] = ast.get_docstring(tree) or ""
    return pipelines


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines as a function or by assignment."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [getattr(statement, "name", ""), *(one.id for one in targets if isinstance(one, ast.Name))]
