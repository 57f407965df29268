"""The reader's step of architectures with relative positions, in C."""
