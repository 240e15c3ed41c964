"""One agent beside jobs that come and go: `make soak`."""
