"""Bodies and helpers that mirror ``torch/distributed/``: the folder that goes
upstream."""
