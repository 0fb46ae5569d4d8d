"""Files for other runtimes."""
