"""Many tensors from one layout to another: what `Transfer` and `redistribute` of the face are made of."""
