"""What protocols name is there: a reader and an aggregation for each, and the pipeline that makes their records."""

from __future__ import annotations

from importlib import import_module

import pytest

from vlm_pg.answers.published import PUBLISHED
from vlm_pg.eval.aggregation import AGGREGATIONS
from vlm_pg.eval.protocols.load import load_protocol, protocol_names
from vlm_pg.eval.readers import reader_name


@pytest.mark.parametrize("name", protocol_names())
def test_what_a_protocol_names_is_there(name: str) -> None:
    protocol = load_protocol(name)
    assert protocol.aggregation in AGGREGATIONS
    assert protocol.reader == "ours" or protocol.reader in PUBLISHED
    assert import_module(f"data_pipelines.{protocol.pipeline}").main
    assert (reader_name(None, protocol), reader_name("published", protocol)) == ("ours", protocol.reader)


def test_without_a_protocol_training_s_reader_reads() -> None:
    assert [reader_name(who, None) for who in (None, "strict", "ours")] == ["strict", "strict", "ours"]
