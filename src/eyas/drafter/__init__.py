"""The drafter: what it is (config), what it computes (model), and how it lies on disk (layouts, checkpoint, check)."""
