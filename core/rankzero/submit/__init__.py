"""The submitter's process checks a job, packs function, arguments and modules, names the training, starts a driver.

`code_*` decide what of the user's code is sent and counts, `pack*` make the bytes and the identity of them.
Ranks do not run this code, and drivers, agents and workers do not import it. `submission` applies the table of
docs/architecture.md#identity-decides to a submission and refuses another training while the run lives; `durable`
applies it to a pipeline step, and ends a run of another training first. If another try of the step follows, the driver
is a detached process, else the run ends with the step. From the first access to the store on, an interrupt of the step
either detaches from the run or ends it; a run that cannot be found or cancelled then is ended by its lease. A submitter
that loses its number to another one looks again. Modules beside a script are searched along a path
that is passed as an argument; ``sys.path`` is never changed.
"""
