"""Parts that every package may use: arguments, files, limits, quantities and their units."""
