"""Tools for all rooms: checked arguments, files, processes, tables, progress. Imports no other room."""
