"""``vlm-pg bench paper``: what a GPU would be asked to do, counted without one."""
