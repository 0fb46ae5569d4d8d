"""Lightning callbacks: everything that a run does beside its steps."""
