"""The search of the fastest plan within a memory budget."""
