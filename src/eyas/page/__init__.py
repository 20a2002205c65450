"""What every report shares: charts without a script, and one stylesheet for light and dark."""
