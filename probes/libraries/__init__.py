"""Mapped libraries: who maps which file, whether two are one, their functions and variables."""
