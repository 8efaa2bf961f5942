"""The measurements behind ``vlm-pg bench``."""
