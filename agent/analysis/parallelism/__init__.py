"""Which communicators are tensor, pipeline, data or expert parallel, by what they call."""
