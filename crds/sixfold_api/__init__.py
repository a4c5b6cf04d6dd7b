"""The contract between the people who write Sixfold's resources, its operator and its runtime.

Models only: this package imports pydantic and the standard library, so both images carry it.
"""
