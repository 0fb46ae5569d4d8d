"""Reports: the results of a run in numbers and figures, and its output on the screen."""
