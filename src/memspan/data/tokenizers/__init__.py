"""Text to ids and back: a kind of tokeniser, a file. They are saved as plain JSON."""
