"""Presentation of runs: `summary` reduces events, `page` and `card` show them, `curves` draws."""
