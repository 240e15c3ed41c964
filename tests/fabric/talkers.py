"""Python processes on the hosts of a fabric that send TCP bytes to each other, as told."""

from __future__ import annotations

import json
import subprocess

SERVE = """
import socket, sys, threading
listeners = [socket.create_server((address, 5001)) for address in sys.argv[1:]]
def drain(connection):
    while connection.recv(1 << 16):
        pass
    connection.close()
def accept(listener):
    while True:
        threading.Thread(target=drain, args=(listener.accept()[0],), daemon=True).start()
for listener in listeners:
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
"""Takes whatever comes on every rail until its standard input ends."""

SEND = """
import json, socket, sys
connections = {}
print("ready", flush=True)
for line in sys.stdin:
    address, count = json.loads(line)
    if address not in connections:
        connections[address] = socket.create_connection((address, 5001))
    connections[address].sendall(bytes(count))
    print("sent", flush=True)
"""
"""Sends so many bytes to an address for every line of its standard input."""


class Talker:
    """A Python process on one host."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.expect("ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, word: str) -> None:
        """Wait for its next word."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def begin(self, address: str, count: int) -> None:
        """Let it send, without waiting until the kernel has taken everything."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([address, count]) + "\n")
        self.process.stdin.flush()

    def send(self, address: str, count: int) -> None:
        self.begin(address, count)
        self.expect("sent")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
