"""Where rows of prompts come from: one file for each kind of source."""
