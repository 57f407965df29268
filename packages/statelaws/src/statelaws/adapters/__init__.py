"""Models of other libraries as models that carry state."""
