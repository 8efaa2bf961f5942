#!/usr/bin/env bash
# Does all of it work on this machine's GPU, how fast, and what was counted beforehand? Within 10 minutes, without a network.
#
#   bash scripts/gpu_check.sh [--out FOLDER] [--model 7b 8b] [--minutes N] [--wheels FOLDER]     --help lists all options
#
# Python is $PYTHON, else that of .venv where there is one, else python3. Nothing is installed: packages that lack are named,
# with what does not work without them; --wheels FOLDER carries them along, --site FOLDER names a folder of packages.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ -n "${PYTHON:-}" ]; then
    python="$PYTHON"
elif [ -x "$root/.venv/bin/python" ]; then
    python="$root/.venv/bin/python"
else
    python=python3
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m scripts.bench.gpu_check "$@"
