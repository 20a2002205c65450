"""HTML reports in single files that work offline: templates, stylesheet, SVG charts; also PNG plots."""
