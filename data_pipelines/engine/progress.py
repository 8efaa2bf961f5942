"""The bar of long work, as the package has it."""

from vlm_pg.progress import Bar as Bar
