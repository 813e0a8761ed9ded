"""A connection of Airflow as the place where trainings run.

Lives here: the form's fields, what they mean (`target.Target`), the Spark configuration with its secrets, what would
stop a training there. May not live here: operators, tasks and runs; nothing here knows of them. Reading a DAG file
loads this room, so engines are imported when they are asked for.
"""
