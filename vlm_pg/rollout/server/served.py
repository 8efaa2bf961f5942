"""A checkpoint as ``transformers serve`` should load it: one that hands back what the model said, word for word.

By default that server takes ``<think>`` and ``<tool_call>`` parts out of a Qwen model's answer, with the words before
them and all space around. A tokenizer may bring a response template of its own; the one written here keeps everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

VERBATIM = {
    "defaults": {"role": "assistant"},
    # The response begins where the prompt ends, whatever a chat template writes for the model to go on from.
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"content": "text", "content_args": {"strip": False}}},
}
TOKENIZER_CONFIG = "tokenizer_config.json"
# ``generate`` takes from it what a request leaves open.
GENERATION_CONFIG = "generation_config.json"


def served_folder(checkpoint: str, home: Path) -> Path:
    """A folder in ``home`` of links to the checkpoint's files, with a tokenizer that asks for verbatim responses.

    It has no ``generation_config.json``. Its name depends on the files, for the server keeps models by name and must
    not take new weights for old ones. Folders of other checkpoints in ``home`` are removed.

    Args:
        checkpoint: a folder, or the name of a model in the download cache.

    Raises:
        OSError: there is no such checkpoint.
    """
    from transformers.utils.hub import cached_file

    config = cached_file(checkpoint, "config.json")
    assert config is not None  # cached_file raises for a required file
    source = Path(config).absolute().parent
    files = sorted(path for path in source.iterdir() if path.is_file())
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(json.dumps([str(source), states]).encode()).hexdigest()[:12]
    target = (home / f"{source.name}-{digest}").absolute()
    if not target.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=home))
        for path in files:
            if path.name not in (TOKENIZER_CONFIG, GENERATION_CONFIG):
                (temporary / path.name).symlink_to(path)
        tokenizer = json.loads((source / TOKENIZER_CONFIG).read_text())
        (temporary / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer | {"response_template": VERBATIM}))
        temporary.chmod(0o755)
        try:
            os.rename(temporary, target)
        except OSError:  # another rank was faster
            shutil.rmtree(temporary)
            if not target.is_dir():
                raise
    for other in home.iterdir():
        if other != target and not other.name.startswith("."):
            shutil.rmtree(other, ignore_errors=True)
    return target
