"""Plans of pipelines: where a program is cut into stages, and on which devices they run."""
