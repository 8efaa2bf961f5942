"""The ranks of a run watch each other: whoever ends without a word is named, and all others end too."""
