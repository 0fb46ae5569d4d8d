"""Reports: what a run leaves in numbers and pictures, and shows on the screen."""
