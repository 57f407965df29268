"""Continuing texts token by token, in constant memory."""
