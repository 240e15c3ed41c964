"""Watch this host for a while and write everything down: `railscope record`."""
