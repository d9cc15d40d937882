"""Find the parts of a model, and give them their first values and random numbers."""
