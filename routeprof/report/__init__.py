"""Reports: one module per output, each taking a Profile."""
