"""Trained models behind other libraries' interfaces. Each needs an extra, and nothing else imports
it."""
