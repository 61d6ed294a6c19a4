"""What can be seen of the service from outside: figures, traces, logs."""
