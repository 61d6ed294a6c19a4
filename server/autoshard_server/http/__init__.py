"""What is between the wire and the routes: callers, bodies, problems, the specification."""
