"""The documentation: what draws its figures, renders its formulas and builds its pages."""
