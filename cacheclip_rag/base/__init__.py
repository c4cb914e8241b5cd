"""What every room may use: errors, checks, clock, paths, progress, database, keys, sampling settings."""
