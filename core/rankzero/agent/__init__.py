"""What runs inside a task: the agent, which owns the workers of one host's slot, and the worker.

    hold        in the engine's own process (Spark's Python worker, or the driver): starts the
                agent, and by dying takes it along
    supervise   the agent: starts workers, forwards what they say, leaves nothing behind
    ending      how its ranks end, and the agent with them
    worker      one rank: calls the user's function or script
    lines       bytes of a rank's output to lines
    descendants finding and ending every process below this one

Everything here travels to executors: standard library and torch only.
"""
