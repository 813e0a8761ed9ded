"""Decorators that make assets and ops of functions, one in each file, and the code that they share.

`compute` makes the function of the step, and turns reports into check results. The resource runs the
training. Only components import this package.
"""
