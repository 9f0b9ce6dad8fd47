"""Arrays, torch tensors and safetensors files as objects of the pool, with shape and dtype."""
