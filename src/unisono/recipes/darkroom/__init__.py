"""Algorithm Distillation: a transformer that learns, from histories of learners, to learn in its context."""
