"""Packages of trackers lie apart from those of the frameworks: a server of MLflow needs other versions of much."""

import sys

from tests.conftest import ROOT

TRACKING = ROOT / ".frameworks" / "tracking" / "site-packages"

if TRACKING.exists():
    # Last, so that only what is missing comes from there.
    sys.path.append(str(TRACKING))
