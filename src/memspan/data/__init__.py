"""Text: corpora, tokenisers, token files and streams. Nothing here knows a model."""
