"""The sides of comparisons, memspan's own and its peers': adapters."""
