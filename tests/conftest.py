"""Settings of the whole suite."""

from hypothesis import settings

# Reproducible examples, and no deadline: the first example pays for imports.
settings.register_profile("autoshard", derandomize=True, deadline=None)
settings.load_profile("autoshard")
