"""Groups of weights that a recipe trains in turn: how it declares them, and which group a step trains."""
