"""Imported by the interpreter that processes of tests are forked from: what a short run spends most of its time on.

What is imported is frozen: a full collection, of which DeepSpeed asks for several when it begins, takes a third of a
second where it looks at all libraries, and the pages it writes to are copied by each process. No module that a test
runs by its name belongs here: runpy warns of one that is imported already.
"""

from importlib import import_module

from vlm_pg.commands import imported_at_once

COSTLY = (
    "vlm_pg.training.main",
    "vlm_pg.eval.main",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
    # Its first engine imports every optimizer, one of which imports torch's compiler.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.tensorboard.summary",
    "transformers.models.qwen2.tokenization_qwen2",
    # Where decoding happens in the run's own process.
    "vlm_pg.media.frame_cache",
    "qwen_vl_utils",
    "av",
)

with imported_at_once():
    for name in COSTLY:
        import_module(name)
