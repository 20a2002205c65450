"""Sockets, HTTP/1.1, TLS, deadlines, and one client's connection."""
