"""One verb each: one public function that returns a frozen report, prints nothing and reports progress by callback."""
