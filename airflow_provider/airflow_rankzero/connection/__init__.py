"""An Airflow connection describes where trainings run.

Modules here define the fields of the form, translate them (`target.Target`), and examine the target for problems. They
do not depend on operators, tasks or runs. Airflow imports this package when it reads a DAG file, so an engine is
imported only when it is used.
"""
