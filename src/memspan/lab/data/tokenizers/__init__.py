"""Text to ids and back; every tokeniser is saved as plain JSON."""
