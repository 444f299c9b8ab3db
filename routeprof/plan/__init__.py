"""Before deployment: what a model needs of the GPUs' memory."""
