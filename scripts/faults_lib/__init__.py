"""What scripts/faults is made of: a lab with its rules, and the faults by kind."""
