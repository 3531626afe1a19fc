"""This project beside the systems that could be used in its place, on the same work."""
