"""Pure numerics: arrays in, numbers out, no I/O."""
