"""report.html: one self-contained file about a run, made from the run's folder alone."""

from __future__ import annotations

from vlm_pg.observe.report.page import write_report

__all__ = ["write_report"]
