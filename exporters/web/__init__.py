"""The HTTP server: /metrics, /stalls, /communicators, health, TLS and passwords."""
