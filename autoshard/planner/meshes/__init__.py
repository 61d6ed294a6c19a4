"""The search over the meshes of a number of devices."""
