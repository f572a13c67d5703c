"""In which order of dimensions arrays should lie."""
