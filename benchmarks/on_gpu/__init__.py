"""What `make gpu` measures: jobs with their predictions. See gpu.py."""
