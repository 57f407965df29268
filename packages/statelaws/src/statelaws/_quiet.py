"""Imports torch without its warning that NumPy is not installed, which nothing here needs."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch  # noqa: F401
