"""Jobs that `make gpu` measures, with their predictions. See gpu.py."""
