"""Pure decisions: facts in, plans out; others carry them out."""
