"""Running every kind of seam on this machine, and comparing it with the reference (`torchseam doctor --check`)."""
