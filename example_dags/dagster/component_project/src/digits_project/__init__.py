"""A project for the ``dg`` command whose training is a folder with a YAML file."""
