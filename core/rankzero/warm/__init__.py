"""The warm server: a process beside the executor that has torch loaded and forks agents. Runs no code of a user."""
