"""Pages that work offline: one HTML file with drawings in it, readable on a phone and in print."""
