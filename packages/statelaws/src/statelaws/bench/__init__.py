"""The bench on which a model is examined, law by law."""
