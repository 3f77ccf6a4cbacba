"""The teacher and the student: how they are loaded, their sizes, and the student's initial weights."""
