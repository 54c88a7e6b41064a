"""Models and how they are cut into stages."""
