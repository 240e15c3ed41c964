"""The loop, its pace, and the objects that it puts together."""
