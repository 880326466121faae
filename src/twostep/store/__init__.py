"""Models by name: the catalogue, the cache folder, and atomic downloads into it."""
