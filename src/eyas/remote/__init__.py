"""Client of other inference servers: addresses, a pool with retries, completions as token ids."""
