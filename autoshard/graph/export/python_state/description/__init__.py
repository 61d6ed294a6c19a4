"""Places and values of Python state, described as text and JSON; for exports and at run time.

In: objects of Python. Out: `Path`s of the places that hold them (`paths`), among them states of
torch (`queries`) and hooks of all modules (`global_hooks`), and `Value`s that are equal where
forward would compute the same (`values`); also in words (`wording`), and with equal layers written
once (`folding`). It imports no other package of `python_state`, and runs no code of users.
"""
