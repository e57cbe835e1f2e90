"""What `tools/bench.py` measures, one noun a file: stock torch and the overlay side by side, in one run."""
