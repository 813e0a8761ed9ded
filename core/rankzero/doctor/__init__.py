"""What would stop a training on an engine, found out before it does, and how to mend it.

Lives here: what can be seen without starting anything (`before`), a training that looks around on the ranks (`probe`),
what that means (`findings`, pure functions), and the two together (`examine`). May not live here: another way to start
ranks: the probe is a training like any other, so what it meets every training meets.
"""

from rankzero import lazy_names

lazy_names(__name__, "findings.judge findings.OK findings.PROBLEM findings.WARNING")
