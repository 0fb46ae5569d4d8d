"""Reports: the results of a run in numbers and pictures, and its output on the screen."""
