"""The warm server is a process beside the executor that has imported torch and forks agents. It runs no user code."""

from rankzero import lazy_names

lazy_names(__name__, "server.LOAD_AFTER server.PRELOADED_LATER")
