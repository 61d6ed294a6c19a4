"""Dynamic sizes: expressions of symbols, guards, and numbers made of them."""
