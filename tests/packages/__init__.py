"""Packages as users install them: on bare roots, with what each distribution brings."""
