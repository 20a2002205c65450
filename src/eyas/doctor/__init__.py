"""The doctor: does this drafter hold, where does it stop holding, and why."""
