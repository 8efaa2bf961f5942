"""``vlm-pg bench step`` and ``rollout``: time and peak memory of ours beside others' ways, on the user's machine."""
