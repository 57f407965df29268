"""Synthetic tasks whose answers are known, one module each. Nothing here knows a model."""
