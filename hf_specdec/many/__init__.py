"""Many requests through one loop: a finished row's place is filled by the next prompt."""
