"""A module that was compiled for one device, made to run on any."""
