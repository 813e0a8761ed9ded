"""Values on their way: formats and handles of results, the envelope of arguments. Standard library and torch only."""
