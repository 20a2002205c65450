"""eyas trains, checks and serves EAGLE-3.1 drafters. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
