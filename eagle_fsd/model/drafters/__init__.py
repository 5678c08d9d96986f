"""Models that propose draft trees. ``eagle.py`` holds the EAGLE-1/2 draft head."""
