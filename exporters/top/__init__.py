"""The live terminal view of a running agent: `railscope top`."""
