"""`RankZeroIOManager`, and the versions of an asset that it commits.

The IO manager knows nothing of trainings: any other asset is stored in the same way.
"""
