"""Algorithm Distillation: a transformer, trained on the histories of learners, learns in its context."""
