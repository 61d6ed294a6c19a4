"""Checks of a call: that ranks agree, and that the call is the one that was planned."""
