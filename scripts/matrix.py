"""Run the tests marked ``matrix``, file by file, in parts that fit a machine's hour, and keep a dated table of results.

    python scripts/matrix.py                     all files that have no result for this commit, for up to 55 minutes
    python scripts/matrix.py --minutes 300       the same, for longer
    python scripts/matrix.py --any-commit        only files that have not passed at any commit
    python scripts/matrix.py tests/numerics      only files below a path

Repeat the command until it prints "complete". Results are rows of docs/matrix.md, one per file, newest result only. A
file that fails gets a row too, and is run again by the next call. Exits with 1 if a file of this call failed, 3 if
files are left.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/matrix.md"
HEADER = """# Matrix: results of the long tests

`bash scripts/test.sh --matrix` runs the tests that the usual run leaves out, file by file, and writes this table: the
newest result of each file.

| file | date | commit | passed | failed | skipped | seconds |
|---|---|---|---|---|---|---|
"""
Row = tuple[str, ...]


def read_rows() -> dict[str, Row]:
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| tests/")]
    return {row[0]: row for row in rows}


def write_rows(rows: dict[str, Row]) -> None:
    lines = [f"| {' | '.join(rows[name])} |" for name in sorted(rows)]
    TABLE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def matrix_files(paths: list[str]) -> list[str]:
    """Test files with at least one test marked matrix, as paths relative to the repository."""
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "matrix and not gpu", *paths],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if collected.returncode not in (0, 5):
        sys.exit(f"pytest could not collect the tests:\n{collected.stdout[-2000:]}{collected.stderr[-2000:]}")
    return sorted({line.partition("::")[0] for line in collected.stdout.splitlines() if "::" in line})


def run_file(name: str, commit: str, limit_seconds: float) -> Row:
    """The table row of one file's matrix tests; a file that exceeds the limit counts as one failure."""
    began = time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "matrix and not gpu", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_seconds
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        counts, output = {"failed": 1}, f"exceeded {limit_seconds:.0f} s"
    else:
        output = done.stdout[-4000:]
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", (output.splitlines() or [""])[-1])
        counts = {kind.rstrip("s") if kind.startswith("error") else kind: int(number) for number, kind in found}
        if done.returncode and not counts.get("failed") and not counts.get("error"):
            counts["failed"] = 1
    failed = counts.get("failed", 0) + counts.get("error", 0)
    seconds = time.monotonic() - began
    print(f"{'FAILED' if failed else 'passed'} {name}: {counts}, {seconds:.0f} s", flush=True)
    if failed:
        print(output, flush=True)
    today = datetime.date.today().isoformat()
    numbers = (counts.get("passed", 0), failed, counts.get("skipped", 0), round(seconds))
    return (name, today, commit, *(f"{number:,}" for number in numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or folders of tests; default: tests")
    parser.add_argument("--minutes", type=float, default=55, help="start no file after this time; default: %(default)s")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one file; default: %(default)s")
    parser.add_argument("--any-commit", action="store_true", help="skip files that passed at another commit, too")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="files at a time")
    options = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    end = time.monotonic() + options.minutes * 60
    rows = read_rows()
    names = matrix_files(options.paths)
    passed = {name for name, row in rows.items() if row[4] == "0" and (options.any_commit or row[2] == commit)}
    pending = [name for name in names if name not in passed]
    # The file that took longest last time first, so that no worker is left alone with it at the end.
    pending.sort(key=lambda name: -int(rows[name][6].replace(",", "")) if name in rows else -(10**6))
    print(f"{len(names)} files, {len(pending)} without a result for {commit}", flush=True)

    def work(name: str) -> Row | None:
        return run_file(name, commit, options.limit) if time.monotonic() < end else None

    results: list[Row] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for done in as_completed([pool.submit(work, name) for name in pending]):
            if (row := done.result()) is not None:
                results.append(row)
                rows[row[0]] = row
                write_rows(rows)
    failures = [row[0] for row in results if row[4] != "0"]
    left = len(pending) - len(results)
    print(f"{len(results)} files run, {len(failures)} failed, {left} left" if left or failures else "complete")
    return 1 if failures else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
