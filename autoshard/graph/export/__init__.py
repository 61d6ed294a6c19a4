"""Export: a module as an archive. Only this part needs torch."""
