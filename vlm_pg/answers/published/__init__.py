"""Published rules of reading, by name: how other projects read and score outputs, their faults included.

A figure is comparable with a published one only where outputs are read alike, so these rules do what the named code
does, right or wrong. Our own reading is elsewhere. ``registry.py`` names them all.
"""
