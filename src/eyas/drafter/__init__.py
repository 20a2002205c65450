"""The drafter: what it is (config), what it computes (model), and how it is stored (layouts, checkpoint, check)."""
