"""Text to ids and back: one kind of tokeniser per file, saved as plain JSON."""
