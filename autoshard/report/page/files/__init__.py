"""The modules and the style sheet of the plan page."""
