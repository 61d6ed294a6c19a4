"""Layers that repeat an earlier one are not traced again.

While a model is traced, a call of a module that is alike, is called alike, and whose forward would
read what an earlier call has read, becomes one node. The archive has the nodes of the earlier call
in its place, with the names, the parameters and the lines that tracing would have given them. Two
calls are traced and must agree before a third is not; whatever is in doubt is traced.

In: a `Recorder` of `python_state`, and a context in which a model is traced. Out: the archive.

* `alike` compares two modules part by part;
* `calls` describes a call, and what its trace added: operators, results, names;
* `reads` are the values that a call read, and whether they are still there;
* `repeated` decides which calls are traced, and adds the nodes of those that are not;
* `lengthen` writes the nodes of the others into an archive.
"""
