"""``vlm-pg bench eval``: answering questions on videos, as the measuring process does it."""
