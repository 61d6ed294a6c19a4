"""Planned models in other training libraries: accelerate, and the Trainer of transformers."""
