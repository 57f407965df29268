"""Trained models in other libraries' clothes. Each needs an extra, and nothing else imports it."""
