"""Parameters and buffers of a planned model, as DTensors."""
