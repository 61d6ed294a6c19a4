"""The HTTP layer: authentication, bodies, errors, and the OpenAPI specification."""
