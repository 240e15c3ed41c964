"""What works on this host and what to do about the rest: `railscope doctor`."""
