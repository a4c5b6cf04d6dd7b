"""`sixfold gate`: what a candidate costs, measured and compared with a baseline, for a pipeline that says no."""
