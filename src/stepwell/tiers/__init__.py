"""Effects on storage: the file operations, the POSIX tier, and the probe of what a file system can do."""
