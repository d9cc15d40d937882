"""Write a small project to begin with."""
