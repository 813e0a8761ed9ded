"""Front doors that look like other launchers', so that code moves over by changing its imports.

Lives here: `torch_distributor`. A front door translates names and nothing else; what it cannot
translate it refuses with a clear error.
"""
