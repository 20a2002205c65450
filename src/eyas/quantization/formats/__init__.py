"""One file for each format of quantised weights."""
