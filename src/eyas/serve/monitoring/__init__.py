"""Metrics, status and logs of the server."""
