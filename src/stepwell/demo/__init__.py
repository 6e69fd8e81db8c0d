"""The demo: a training run is killed in the middle of a save, resumed, and compared bit for bit."""

from stepwell.demo.story import run

__all__ = ["run"]
