"""`RankZeroIOManager` and the versions that it commits.

May not live here: anything that knows of trainings; an asset that was never trained is stored in the same way.
"""
