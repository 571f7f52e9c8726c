"""The compiler: find seams in a captured graph, decide, rewrite, report."""
