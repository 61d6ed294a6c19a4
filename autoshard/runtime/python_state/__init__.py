"""The Python state that forward read at export, compared with the model's on every call.

In: the records of the exports of all plans of a model (`autoshard.graph.export.python_state`). Out:
an error that names what is different.

* `lookup` finds recorded places in the model;
* `reference` makes a record of the model as it is, for plans without one;
* `walk` notices in some microseconds that nothing has changed;
* `differences` says what is different, and what to do about it;
* `state` ties them together.
"""
