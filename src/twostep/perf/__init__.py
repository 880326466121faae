"""Cost models: predict how long a step takes on this machine."""
