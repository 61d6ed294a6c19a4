"""Plans and answers as text for terminals."""
