# Shared set-up, sourced by the other scripts: makes .venv and installs the project into it, once.
# shellcheck shell=bash
#
#   set_up_environment   does nothing if .venv is complete and fits pyproject.toml and constraints.txt
#
# Settings: PYTHON names the interpreter to make .venv with; proxies, certificates and indexes are taken from the usual
# environment variables and from pip's own configuration.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO_ROOT/.venv"
STAMP="$VENV/.vlm-pg-installed"
EXTRAS="dev,tracking"

set_up_environment() {
    if _is_installed; then
        return 0
    fi
    mkdir -p "$VENV"
    # Two scripts started at once must not install into one folder at the same time.
    if command -v flock >/dev/null; then
        exec 9>"$VENV/.vlm-pg-lock"
        flock 9
        if _is_installed; then
            exec 9>&-
            return 0
        fi
    fi
    echo "Setting up .venv (once; seconds to minutes, depending on the network)"
    rm -f "$STAMP"
    _make_venv
    _install
    _compile_what_is_imported
    # Last, so that an interrupted set-up is repeated.
    _fingerprint >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    if command -v flock >/dev/null; then
        exec 9>&-
    fi
    echo "Set-up done"
}

# What the installation depends on; the folder too, since an editable install points to it.
_fingerprint() {
    printf '%s %s\n' "$REPO_ROOT" "$EXTRAS"
    (cd "$REPO_ROOT" && cksum pyproject.toml constraints.txt)
}

_is_installed() {
    [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP")" = "$(_fingerprint)" ]
}

_is_usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_make_venv() {
    if [ -x "$VENV/bin/python" ] && _is_usable_python "$VENV/bin/python" \
        && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        if _is_usable_python "$candidate"; then
            # --clear would remove the lock that another start may be waiting for.
            find "$VENV" -mindepth 1 -maxdepth 1 ! -name .vlm-pg-lock -exec rm -rf {} +
            "$candidate" -m venv "$VENV"
            return 0
        fi
    done
    cat >&2 <<MESSAGE
No usable Python was found (looked for: ${PYTHON:-python3.13 python3.12 python3.11 python3 python}).
Needed is Python 3.11 or newer with its venv and ensurepip modules.
On Debian and Ubuntu: apt-get install python3 python3-venv. Or name one: PYTHON=/path/to/python3.12 bash scripts/...
MESSAGE
    return 1
}

_install() {
    local python="$VENV/bin/python"
    cd "$REPO_ROOT"
    if "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv; then
        # In a subshell: these variables are for uv only.
        if (
            eval "$(_pip_settings_for_uv)"
            "$VENV/bin/uv" pip install --python "$python" -c constraints.txt -e ".[$EXTRAS]"
        ); then
            return 0
        fi
        echo "uv could not install everything; trying again with pip, which takes longer" >&2
    else
        echo "uv could not be installed; going on with pip, which takes longer" >&2
    fi
    if ! "$python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]"; then
        cat >&2 <<MESSAGE
The dependencies could not be installed; pip's own message is above.
Needed is access to a Python package index. Behind a proxy or with a mirror, set HTTPS_PROXY, PIP_INDEX_URL and PIP_CERT
(or pip.conf), then start this script again: it goes on where it stopped.
MESSAGE
        return 1
    fi
}

# Many images set PYTHONDONTWRITEBYTECODE. Every process would then compile torch, transformers and more anew: 10 of the
# 18 seconds that a training run needs for its imports. Without it Python keeps what it compiles by itself.
_compile_what_is_imported() {
    if [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        return 0
    fi
    echo "Compiling what is imported (PYTHONDONTWRITEBYTECODE is set, so that Python would do it at every start)"
    env -u PYTHONDONTWRITEBYTECODE CUDA_VISIBLE_DEVICES= "$VENV/bin/python" - >/dev/null 2>&1 <<'PYTHON' || true
import importlib
from contextlib import suppress

for name in (
    *("vlm_pg.training.main", "vlm_pg.eval.main", "vlm_pg.media.worker", "vlm_pg.media.decode_file", "qwen_vl_utils"),
    *("vlm_pg.answers.mathematics", "vlm_pg.verify.main", "vlm_pg.bench.worker", "data_pipelines.embedded", "peft"),
    *("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl"),
    *("transformers.models.qwen3_vl.modeling_qwen3_vl", "transformers.models.qwen3_vl.processing_qwen3_vl"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.tensorboard.summary", "datasets", "trl"),
    *("trl.trainer.grpo_trainer", "latex2sympy2_extended", "math_verify", "sympy"),
):
    with suppress(Exception):
        importlib.import_module(name)
PYTHON
}

# uv does not read pip's configuration, so what it says about the network is handed on as uv's own variables. Variables
# that are set already win.
_pip_settings_for_uv() {
    "$VENV/bin/python" - <<'PYTHON'
import ast
import os
import shlex
import subprocess
import sys

lines = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
).stdout.splitlines()
pip = {}
for section in ("global", "install", ":env:"):  # in pip's order of precedence, the last wins
    for line in lines:
        name, _, value = line.partition("=")
        if name.startswith(f"{section}."):
            pip[name.rpartition(".")[2]] = ast.literal_eval(value)

def words(key):
    return pip.get(key, "").split()

# uv stops at a folder of wheels that does not exist; pip ignores it.
links = [link for link in words("find-links") if "://" in link or os.path.isdir(link)]
found = {
    "SSL_CERT_FILE": pip.get("cert"),
    "UV_DEFAULT_INDEX": pip.get("index-url"),
    "UV_INDEX": " ".join(words("extra-index-url")),
    # pip takes the best version of all indexes; without this uv would look at the first index that has a package.
    "UV_INDEX_STRATEGY": "unsafe-best-match" if words("extra-index-url") else None,
    "UV_FIND_LINKS": ",".join(links),
    "UV_INSECURE_HOST": " ".join(words("trusted-host")),
    "HTTPS_PROXY": pip.get("proxy"),
    "HTTP_PROXY": pip.get("proxy"),
    "UV_HTTP_TIMEOUT": pip.get("default-timeout") or pip.get("timeout"),
}
for name, value in found.items():
    if value and not os.environ.get(name) and not os.environ.get(name.lower()):
        print(f"export {name}={shlex.quote(value)}")
PYTHON
}
