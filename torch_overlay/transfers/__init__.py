"""Many tensors from one layout to another: what `torch_overlay.Transfer` and `redistribute` are made of."""
