"""Where jobs are done: workers, and the processes that solve for them."""
