"""Reports -> one self-contained HTML file each: no script, nothing from elsewhere, the same bytes for the same report."""
