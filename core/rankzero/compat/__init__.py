"""Drop-in replacements for other launchers, so that code moves to rankzero by changing its imports.

A replacement translates names and arguments only. An argument that has no equivalent raises an error that names it.
"""
