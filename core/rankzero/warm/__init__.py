"""The warm server: a process beside the executor that has torch loaded and forks agents. Runs no code of a user."""

from rankzero import lazy_names

lazy_names(__name__, "server.PRELOADED_LATER")
