"""What any process asks of the machine it runs on: processes and their descendants, forks, addresses.

Standard library only; knows nothing of runs.
"""
