"""Algorithm Distillation: a transformer that was trained on learning histories learns new tasks in its context."""
