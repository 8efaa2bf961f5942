"""Ranks watch each other: a rank that dies is named, and all others end too."""
