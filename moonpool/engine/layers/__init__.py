"""The parts a model is made of: rotary positions and attention over pages. Functions on tensors, any device."""
