"""`unisono tune`: searches for good settings of a recipe with Optuna; every trial is a run of `unisono train`."""
