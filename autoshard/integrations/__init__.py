"""Planned models in other libraries: accelerate, the Trainer of transformers; MASE's pass."""
