"""The submitter's process checks a job, packs function, arguments and modules, names the training, starts a driver.

`code` and `code_files` decide what of the user's code is sent and counts, `pack` makes the bytes and the identity of
them, `start` decides with `existing` what becomes of the run under an id and writes the next submission, and `durable`
opens runs and starts their drivers. Ranks do not run this code, and drivers, agents and workers do not import it.
Modules beside a script are searched along a path that is passed as an argument; ``sys.path`` is never changed.
"""
