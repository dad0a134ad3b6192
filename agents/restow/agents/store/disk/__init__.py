"""States on disk: files with runs of pages, and a journal that says which runs are complete."""
