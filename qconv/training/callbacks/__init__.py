"""Lightning callbacks: everything that a run does around its steps."""
