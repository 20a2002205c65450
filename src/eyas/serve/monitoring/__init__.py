"""What the server tells about itself: metrics, status, logs."""
