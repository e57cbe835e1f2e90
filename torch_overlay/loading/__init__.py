"""Where a model's own loader puts each weight: the loader runs on tensors without memory, and what it would copy is
recorded. Start reading at `landings.find_landings`."""
