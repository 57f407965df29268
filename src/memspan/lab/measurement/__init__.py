"""How far back a trained run remembers: one measurement per file, and a report."""
