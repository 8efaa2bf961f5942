"""Prepared records: reading and writing them, their order in training, and the log of those that cannot be used."""
