"""Options of the agent: from the command line, from a file, with defaults and errors."""
