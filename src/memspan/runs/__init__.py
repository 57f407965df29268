"""A run: its options, its folder, and each file in it."""
