"""Work that may hang, crash or fill the memory, in processes that are killed and replaced: one loss costs one task."""
