"""The submitter's process checks a job, packs function, arguments and modules, names the training, starts a driver.

`code_*` decide what of the user's code is sent and counts, `pack*` make the bytes and the identity of them, `start`
decides with `existing` what becomes of the run under an id and writes the next submission, `drivers` starts its driver,
and `durable` opens runs. Ranks do not run this code, and drivers, agents and workers do not import it. If another try
of a pipeline step follows, the driver is a detached process, else the run ends with the step. From the first access to
the store on, an interrupt of the step either detaches from the run or ends it; a run that cannot be found or cancelled
then is ended by its lease. Modules beside a script are searched along a path that is passed as an argument;
``sys.path`` is never changed.
"""
