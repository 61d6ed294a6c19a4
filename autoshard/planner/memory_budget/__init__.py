"""The cheapest plan whose peak obeys a memory budget: the problem with what is held as a choice."""
