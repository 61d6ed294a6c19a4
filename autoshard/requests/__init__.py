"""Requests: one function and one request model for each use case.

The command line, Python and the service share them. In: a model, a mesh, options. Out: a plan, a
ranking of meshes, a coverage, an explanation. `running` has the functions, `this_process` runs
them with what is kept on this machine. May import all of planning, but no client and no server.
"""
