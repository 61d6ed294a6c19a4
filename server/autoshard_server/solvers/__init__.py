"""Running jobs: workers, executors, and the processes that solve."""
