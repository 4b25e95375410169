"""Recipes: each file is executable Python that defines `config = TrainSettings(...)`."""
