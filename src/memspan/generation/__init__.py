"""Continuing texts token by token, in constant memory."""

from memspan.generation.writer import Generation, Writer, generate

__all__ = ["Generation", "Writer", "generate"]
