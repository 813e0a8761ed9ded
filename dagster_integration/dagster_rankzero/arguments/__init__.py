"""Arguments that Dagster gives to a training function: plain values, inputs that ranks open, partition keys.

The resource, the decorators and the IO manager import this package, and it imports none of them.
"""
