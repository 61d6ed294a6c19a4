"""Recording of what forward reads and changes while a model is traced.

In: a model, and a context in which it is traced. Out: a `Recorder` with the value of each place
that was read, the modules that ran with their arguments (`calls`), and what is another value
afterwards (`changes`); classes are as before when the context ends (`patching`). It imports
`description` and `user_code`.
"""
