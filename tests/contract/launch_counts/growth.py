"""Compares the counts of a launch with those in `counts.json`."""

GROWTH = 1.05  # A count that is more than this many times the one in the file fails the test

Counts = dict[str, dict[str, int]]


def grown(known: Counts, found: Counts) -> list[str]:
    """Returns a line for each count that grew by more than `GROWTH`."""
    return [
        f"{role}, {name}: {count}, and {known.get(role, {}).get(name, 0)} in counts.json"
        for role, counts in found.items()
        for name, count in counts.items()
        if count > GROWTH * known.get(role, {}).get(name, 0)
    ]
