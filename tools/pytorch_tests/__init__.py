"""PyTorch's own test files, unmodified, on two sides, and what differs. `tools/run_pytorch_tests.py` is the command."""
