"""The sides of comparisons, memspan's own and its peers': one adapter per file."""
