"""``python -m rankzero.driver.main RUN_DIR --submission N``: the detached driver."""

from rankzero.driver.main import main

main()
