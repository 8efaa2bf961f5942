"""Evaluation protocols: how each published set is asked, sampled, read and averaged, by name."""
