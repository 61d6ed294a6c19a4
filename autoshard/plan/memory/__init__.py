"""What one rank holds at every moment of a step, and what backward needs, keeps or runs again."""
