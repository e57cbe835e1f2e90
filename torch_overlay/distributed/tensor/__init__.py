"""Bodies and helpers that mirror ``torch/distributed/tensor/``."""
