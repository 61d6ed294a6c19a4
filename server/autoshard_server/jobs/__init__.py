"""Jobs: rows with a state machine, who may add one, and when a worker counts as dead."""
