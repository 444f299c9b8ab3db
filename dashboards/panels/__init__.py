"""What stands in the views' panels: from a context to numbers, figures and captions."""
