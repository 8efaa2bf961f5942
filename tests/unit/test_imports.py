"""No module needs, by whatever way, one that needs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.runs import ROOT


def imports(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules that ``path`` imports anywhere: for types alone and inside functions, too."""
    named: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import, which is not followed"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named += [name if name in modules else node.module for name in inside]
    return {name for name in named if name in modules}


def circles(package: Path) -> Iterator[list[str]]:
    """Modules of ``package`` that need each other, circle by circle."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    needs = {name: imports(path, modules) - {name} for name, path in modules.items()}
    # What needs nothing that is left, or what nothing that is left needs, is in no circle.
    while free := {name for name in needs if not needs[name] or not any(name in other for other in needs.values())}:
        needs = {name: others - free for name, others in needs.items() if name not in free}
    while needs:
        start = min(needs)
        reached = _reached(needs, start)
        circle = {name for name in reached if start in _reached(needs, name)}
        if circle:
            yield sorted(circle)
        gone = circle | {start}
        needs = {name: others - gone for name, others in needs.items() if name not in gone}


def _reached(needs: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(needs[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += needs[name]
    return found


def test_every_way_to_import_closes_a_circle(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "deep").mkdir(parents=True)
    sources = {
        "__init__": "",
        "deep/__init__": "",
        "a": "from p import b",
        "b": "import p.deep.c\nimport torch",
        "deep/c": "if TYPE_CHECKING:\n    from p.a import A",
        "d": "def f():\n    from p.e import E",
        "e": "import p.d, p.a",
        "alone": "import p.a\nimport p.e",
    }
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    assert list(circles(package)) == [["p.a", "p.b", "p.deep.c"], ["p.d", "p.e"]]


def test_no_module_needs_one_that_needs_it() -> None:
    assert list(circles(ROOT / "vlm_pg")) == []
