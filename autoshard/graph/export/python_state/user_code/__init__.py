"""Functions of users: whose code they are, which of their lines ran, and what those lines name.

In: functions, and frames that run. Out: digests of code (`code`), whether it is the user's that
reads (`readers`), the names in the lines that ran (`executed_lines`), the places that these lead to
(`global_names`), among them clocks and random numbers (`sources`), and the objects that are reached
(`holders`). It imports `description` alone.
"""
