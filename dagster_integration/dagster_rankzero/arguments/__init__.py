"""What a training function gets from Dagster: values freed of it, inputs that ranks open, partition keys.

May not live here: anything that knows the resource, the decorators or an IO manager; they all build on this.
"""
