"""The verbs of the command line, one per file: parse, call, print."""
