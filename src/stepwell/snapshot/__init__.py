"""From the trainer's memory to a slot: the slot as the trainer sees it, eager and lazy copies, accelerators."""
