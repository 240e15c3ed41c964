"""The faces: what is shown, made of one immutable snapshot."""
