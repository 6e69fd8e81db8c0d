"""Reading a run: what is there, which step to take, and its bytes, every one of them checked."""
