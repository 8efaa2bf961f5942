"""Grouped attention inside other trainers."""
