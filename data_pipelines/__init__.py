"""Raw data set -> prepared records: one file per data set, each ``python -m data_pipelines.NAME --out DIR``.

``vlm_pg`` never imports this package; it imports only ``vlm_pg.data``, ``vlm_pg.media`` and ``vlm_pg.rewards``.
"""
