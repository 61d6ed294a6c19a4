"""What users demand of a plan, as tests of strategies: pins, the batch, patterns."""
