"""The Python state that forward reads, recorded at export, and compared when a plan runs.

An export runs forward once, and what it read of numbers, flags, functions and modes is frozen into
the program. In: a copy of the model that `torch.export` traces. Out: a mapping of JSON, the
`record`, which plan documents carry.

* `paths` names the places that hold values, and looks them up without running code;
* `values` describes values as JSON;
* `code` tells whose code a function is, and makes digests of it;
* `executed_lines` finds the globals, free variables and queries of the lines that ran;
* `recorder` puts the reads together;
* `effects` finds the modes that make a difference;
* `changes` finds what forward itself changed or drew;
* `folding` writes equal layers once.
"""
