"""autoshard."""
