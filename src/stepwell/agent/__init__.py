"""The process that owns the slots and persists them, and the trainer's side of talking to it. Never imports torch."""
