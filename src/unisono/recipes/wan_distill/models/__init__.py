"""The teacher and the student: loading, sizes and initial weights."""
