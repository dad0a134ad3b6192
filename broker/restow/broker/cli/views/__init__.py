"""Views turn what a command knows into tables, JSON or a screen."""
