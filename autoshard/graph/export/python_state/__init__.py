"""The Python state that forward reads, recorded at export, and compared when a plan runs.

An export runs forward once, and what it read of numbers, flags, functions and modes is frozen into
the program. In: a copy of the model that `torch.export` traces. Out: a mapping of JSON, the
`record`, which plan documents carry.

* `description` names the places that hold values, and describes values as JSON;
* `user_code` tells whose code a function is, which of its lines ran, and what they name;
* `recording` puts the reads together, and finds what forward itself changed or drew;
* `modes` finds the modes that make a difference;
* `record` makes the mapping of all that.

It imports the packages below `graph`, and `export.tracing` to run modules on the meta device.
"""
