"""A value for the function of a stage, which a test cancels before the engine has the stage."""

import threading
import time
from typing import Any

LONGEST = 30.0


class PickledLate:
    """Waits for the test while it is pickled, and keeps a task that has it busy."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        self.begun.set()
        self.may_end.wait(LONGEST)
        return time.sleep, (LONGEST,)
