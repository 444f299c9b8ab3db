"""Reading a checkpoint expert by expert, and what low precision would do to it."""
