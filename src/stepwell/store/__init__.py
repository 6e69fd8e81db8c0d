"""The format on disk, pure: bytes in, bytes out. Knows neither torch nor files."""
