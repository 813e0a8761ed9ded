"""The submitter's process: checks a job, packs function, arguments and modules, names the training, starts a driver.

Nothing in here runs where ranks are, and nobody below (drivers, agents, workers) imports it.
"""
