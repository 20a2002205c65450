"""HTML reports: one file each that opens anywhere, offline. Templates, one stylesheet, charts without a script."""
