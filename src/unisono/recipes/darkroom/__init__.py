"""Algorithm Distillation: a transformer trained on learning histories learns new tasks in its context."""
