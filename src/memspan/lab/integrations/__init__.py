"""Trained models behind other libraries' interfaces. Each needs an extra; no other room imports it."""
