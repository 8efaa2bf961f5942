"""report.html of an evaluation: one self-contained file, made from results folders alone."""

from __future__ import annotations

from vlm_pg.eval.report.page import write_eval_report

__all__ = ["write_eval_report"]
