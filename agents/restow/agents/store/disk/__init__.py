"""States on a disk: runs of pages in files, and a journal that says which of them are whole."""
