"""Measurements of how far back a trained run remembers, one per file, and a report."""
