"""Tests with a whole Airflow. A package, so that pytest ends it with the last of them."""
