"""Text: corpora, tokenisers, token files and streams. Independent of models."""
