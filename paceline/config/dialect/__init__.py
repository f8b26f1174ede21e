"""The keys and values that people bring from verl, and what becomes of each: one table, apart from our own."""
