#!/usr/bin/env bash
# Everything that must pass before a change goes in. Further arguments go to pytest, for example -k rewards.
#
#   --matrix [PATHS ...]        the long tests instead, in parts of an hour; repeat until complete (scripts/matrix.py)
#   VLM_PG_MEDIA, VLM_PG_DATA   folders of real media and annotation files; tests that need them are skipped without
#   VLM_PG_VLLM                 the executable of a vLLM (scripts/vllm_env.sh), for tests marked matrix; likewise
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

set_up_environment
cd "$REPO_ROOT"
export PATH="$VENV/bin:$PATH"

if [ "${1:-}" = "--matrix" ]; then
    shift
    exec python scripts/matrix.py "$@"
fi

check() {
    echo "== $*"
    "$@"
}

check ruff check .
check ruff format --check .
check lint-imports
# mypy takes a minute of one core, so it runs beside the first tests. Errors are printed when it finds them.
echo "== mypy (in the background)"
(found="$(mypy 2>&1)" || { printf '== mypy failed\n%s\n' "$found"; exit 1; }) &
types=$!
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # One GPU is not shared by several workers.
    options=(-m "not matrix" -n 0)
else
    # One torch thread per worker (tests/conftest.py), a file's tests on one worker because they share costly fixtures.
    # In the order of their folders: whole runs, few and long, come first, so that no worker is left alone with one.
    options=(-m "not gpu and not matrix" -n "$(python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')" --dist loadfile --no-loadscope-reorder)
fi
echo "== pytest"
status=0
python -m pytest -q "${options[@]}" "$@" || status=$?
wait "$types" || { echo "== mypy failed, see above"; [ "$status" != 0 ] || status=1; }
exit "$status"
